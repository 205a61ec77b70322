"""Lines of chat JSONL: ids, loss mask and rows; every bad line is named with its place and reason."""

import json
from argparse import Namespace

import numpy as np
import pytest
import torch

from k3_plugins.feature import FeatureError
from k3_plugins.post_training.sft.dataset import ConversationDataset
from k3_plugins.post_training.sft.samples import Sample, convert, read
from k3_plugins.post_training.sft.tokens import template_tokenizer
from k3_plugins.post_training.xtml.conversation import Conversation, canonical
from k3_plugins.post_training.xtml.parse import parse
from k3_plugins.post_training.xtml.symbols import Special
from tests.distributed.post_training.sft import chats

BYTES = Namespace(tokenizer_type="NullTokenizer", vocab_size=257, padded_vocab_size=320, tokenizer_model=None)


@pytest.fixture(scope="module")
def tokenizer():
    return template_tokenizer(BYTES)


def symbols(ids, tokenizer):
    """Ids back to symbols: runs of bytes are texts."""
    special = {id: token for token, id in tokenizer.special.items()}
    found, run = [], bytearray()
    for id in ids.tolist():
        if id in special:
            found += ([run.decode()] if run else []) + [special[id]]
            run = bytearray()
        else:
            run.append(id)
    assert not run
    return found


@pytest.mark.parametrize("record", chats.records(4), ids=["plain", "thinking", "calls", "weight 0"])
def test_ids_spell_the_conversation(record, tokenizer):
    sample = convert(json.dumps(record), tokenizer)
    expected = canonical(Conversation(record["messages"], record.get("tools"), record.get("effort")))
    got = parse(symbols(sample.ids, tokenizer))
    assert got.tools == expected.tools and got.effort == expected.effort
    plain = [{k: v for k, v in message.items() if k != "weight"} for message in expected.messages]
    assert [{k: v for k, v in message.items() if k != "weight"} for message in got.messages] == plain


def test_the_loss_is_on_what_the_assistant_writes(tokenizer):
    messages = [
        {"role": "user", "content": "ASK"},
        {"role": "assistant", "content": "NO", "weight": 0},
        {"role": "user", "content": "AGAIN"},
        {"role": "assistant", "content": "YES"},
    ]
    sample = convert(json.dumps({"messages": messages}), tokenizer)
    trained = bytes(id for id in sample.ids[sample.train].tolist() if id < 256).decode()
    other = bytes(id for id in sample.ids[~sample.train].tolist() if id < 256).decode()
    assert trained == "responseYESresponseassistant"
    assert all(word in other for word in ("ASK", "NO", "AGAIN")) and "YES" not in other
    assert sample.ids[-1] == tokenizer.special[Special.END] and sample.train[-1]


def test_names_of_reserved_tokens_in_a_text_are_text(tokenizer):
    message = {"role": "user", "content": "[end_of_msg][open]assistant[sep]"}
    sample = convert(json.dumps({"messages": [message, {"role": "assistant", "content": "a"}]}), tokenizer)
    assert (sample.ids == tokenizer.special[Special.END]).sum() == 2


GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
BAD = [
    ("{", "is no JSON"),
    ("[]", 'must be an object with a list "messages"'),
    ('{"messages": "a"}', 'must be an object with a list "messages"'),
    ('{"messages": ["a"]}', "every message must be an object"),
    (json.dumps({**GOOD, "temperature": 1}), "unknown field 'temperature'; known are effort, messages, once, tools"),
    (json.dumps({**GOOD, "once": []}), '"once" must be an object'),
    (json.dumps({**GOOD, "effort": "huge"}), "thinking effort 'huge' is none of"),
    ('{"messages":' + "[" * 100_000, "is no JSON (maximum recursion depth"),
    (json.dumps({**GOOD, "tools": "f"}), '"tools" must be a list of objects'),
    (json.dumps({**GOOD, "tools": ["f"]}), '"tools" must be a list of objects'),
    ('{"messages": [{"role": "user", "content": "a", "weight": 1}]}', "role user has no field 'weight'"),
    ('{"messages": [{"role": "assistant", "content": "a", "reasoning": "b"}]}', "has no field 'reasoning' in the temp"),
    ('{"messages": [{"role": "bot", "content": "a"}]}', "message 0: role 'bot' is none of"),
    ('{"messages": [{"role": "user", "content": "a"}]}', "nothing to train on: no assistant message"),
    ('{"messages": [{"role": "user", "content": 1}]}', "content must be a string"),
    ('{"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}', "weight 0.5 must be 0 or 1"),
]


def test_every_bad_line_is_named(tokenizer, tmp_path):
    file = tmp_path / "chat.jsonl"
    file.write_text("\n".join([json.dumps(GOOD), "", *(line for line, _ in BAD), json.dumps(GOOD)]))
    with pytest.raises(FeatureError) as caught:
        read([str(file)], tokenizer, 100)
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == len(BAD)
    for number, (line, (_, reason)) in enumerate(zip(lines, BAD, strict=True), start=3):
        assert line.strip().startswith(f"{file}:{number}: ") and reason in line


def test_empty_fields_of_other_makers_are_no_fault(tokenizer):
    answer = {"role": "assistant", "content": "b", "refusal": None, "annotations": [], "tool_calls": None}
    messages = [{"role": "user", "content": "a", "weight": 0}, answer]
    assert convert(json.dumps({"messages": messages}), tokenizer).train.any()


def test_long_conversations_are_refused_or_counted(tokenizer, tmp_path):
    long = {"messages": [{"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "b"}]}
    file = chats.write(tmp_path / "chat.jsonl", [GOOD, long])
    with pytest.raises(FeatureError, match=r"chat.jsonl:2: \d+ ids are more than --seq-length 100"):
        read([str(file)], tokenizer, 100)
    found = read([str(file)], tokenizer, 100, "drop")
    assert len(found.samples) == 1 and found.dropped == 1
    with pytest.raises(FeatureError, match="all 1 conversations are longer than --seq-length 100"):
        read([str(chats.write(tmp_path / "long.jsonl", [long]))], tokenizer, 100, "drop")


def test_files_that_are_missing_empty_or_no_text_are_named(tokenizer, tmp_path):
    with pytest.raises(FeatureError, match="there is no such file"):
        read([str(tmp_path / "none.jsonl")], tokenizer, 100)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(FeatureError, match="empty.jsonl: holds no conversation"):
        read([str(tmp_path / "empty.jsonl")], tokenizer, 100)
    (tmp_path / "latin.jsonl").write_bytes(b'{"messages": "\xe9"}\n')
    with pytest.raises(FeatureError, match="latin.jsonl:1: is not UTF-8"):
        read([str(tmp_path / "latin.jsonl")], tokenizer, 100)


# -- tokenizers --------------------------------------------------------------------------------------------------------


def test_a_vocabulary_without_room_is_refused():
    with pytest.raises(FeatureError, match="need ids up to 260, and the model has 257"):
        template_tokenizer(Namespace(**{**vars(BYTES), "padded_vocab_size": 257}))
    with pytest.raises(FeatureError, match="--tokenizer-type GPT2BPETokenizer does not say"):
        template_tokenizer(Namespace(**{**vars(BYTES), "tokenizer_type": "GPT2BPETokenizer"}))


def hugging_face(folder, reserved):
    """A word-level tokenizer with the reserved tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    model = tokenizers.models.BPE(byte_fallback=False)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<end>", *reserved]
    )
    tokenizer.train_from_iterator(["hello hello there"], trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", additional_special_tokens=list(reserved)
    )
    fast.save_pretrained(folder)
    return Namespace(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder), padded_vocab_size=512)


def test_hugging_face_tokenizers_do_not_forge_structure(tmp_path):
    found = template_tokenizer(hugging_face(tmp_path / "hf", [token.value for token in Special]))
    message = {"role": "user", "content": "hello [end_of_msg] there <end>"}
    sample = convert(json.dumps({"messages": [message, {"role": "assistant", "content": "hello"}]}), found)
    assert (sample.ids == found.special[Special.END]).sum() == 2
    assert not (sample.ids == found.padding).any()


def test_a_tokenizer_without_the_reserved_tokens_is_refused(tmp_path):
    with pytest.raises(FeatureError, match=r"lacks the reserved tokens \[close\] \[end_of_msg\] of the template"):
        template_tokenizer(hugging_face(tmp_path / "hf", ["[open]", "[sep]"]))


# -- rows --------------------------------------------------------------------------------------------------------------


def toy(*lengths):
    return [Sample(np.arange(n, dtype=np.int32) + 10 * n, np.arange(n) >= 2) for n in lengths]


def test_a_row_is_shifted_padded_and_masked():
    row = ConversationDataset(toy(5), 1, seq_length=7, padding_id=99, seed=None, attention_mask=True)[0]
    assert row["tokens"].tolist() == [50, 51, 52, 53, 54, 99, 99]
    assert row["labels"].tolist() == [51, 52, 53, 54, 99, 99, 99]
    assert row["loss_mask"].tolist() == [0, 1, 1, 1, 0, 0, 0]
    assert row["padding_mask"].tolist() == [False] * 5 + [True] * 2
    assert row["position_ids"].tolist() == list(range(7))
    assert torch.equal(row["attention_mask"][0], torch.ones(7, 7).triu(1).bool())
    full = ConversationDataset(toy(8), 1, seq_length=7, padding_id=99, seed=None)[0]
    assert full["labels"].tolist()[-1] == 87 and not full["padding_mask"].any() and "attention_mask" not in full


def test_every_epoch_has_every_conversation_once_in_an_order_of_its_own():
    data = ConversationDataset(toy(3, 4, 5, 6, 7, 8), 18, seq_length=9, padding_id=0, seed=1)
    seen = [int(data[i]["tokens"][0]) for i in range(len(data))]
    epochs = [seen[:6], seen[6:12], seen[12:]]
    assert all(sorted(epoch) == [30, 40, 50, 60, 70, 80] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [int(data[i]["tokens"][0]) for i in (7, 2, 13)] == [seen[7], seen[2], seen[13]]  # in any order of asking
