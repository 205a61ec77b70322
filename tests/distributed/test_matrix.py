"""The matrix of features: docs/verification.md says what was measured and what is refused, and no more.

The whole matrix is trained behind the marker `slow`; `python -m tests.distributed.matrix run` does the same and records
it. Here the refusals are asked for anew, some cases are trained, and the page is compared with the record.
"""

from dataclasses import replace

import pytest

from tests.distributed.matrix import __main__ as matrix
from tests.distributed.matrix import page
from tests.distributed.matrix.cases import FEATURES, all_cases, axis_cases, case, pair_cases, pairs
from tests.distributed.matrix.cells import NOT_VERIFIED, REFUSES, VERIFIED, cells, decide
from tests.distributed.matrix.record import Record
from tests.distributed.matrix.refusals import ask
from tests.distributed.matrix.runs import DIFFERENT, EQUAL, FAILED, REFUSED, Outcome, Runs, compare
from tests.distributed.matrix.table import AXES, PAIRS, SUBJECTS, Bounds
from tests.harness import gradients

REMEDY = "run `python -m tests.distributed.matrix page` and look at what changed in docs/verification.md"

RECORD = Record.read()
CASES = {each.id: each for each in all_cases()}
REPRESENTATIVE = [
    case(["latent-moe"], AXES["SP"][0]),  # experts whole on each tensor rank: reduced over a group of their own
    case(["pipeline-zero2"], AXES["resume"][0]),
    case(["attnres", "pipeline-zero2"], PAIRS[0]),
]
"""One of each kind: gradients, a resumed run, a pair in the largest layout."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("matrix"))


def recorded(each):
    """Whether the record says that it trains."""
    entry = RECORD.of(each)
    return each.id not in RECORD.refusals and entry is not None and entry["result"] != REFUSED


# -- the record and the page -------------------------------------------------------------------------------------------


def test_every_feature_has_a_row():
    """The registry decides which features there are; the table says how each is turned on."""
    assert set(SUBJECTS) == set(FEATURES), "add the feature to SUBJECTS in tests/distributed/matrix/table.py"
    found = cells(RECORD)
    assert len(found) == len(FEATURES) * (len(AXES) + (len(FEATURES) - 1) / 2)


def test_a_name_without_cases_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["matrix", "run", "--only", "attnress"])
    with pytest.raises(SystemExit) as caught:
        matrix.main()
    assert caught.value.code == 2 and "--only 'attnress': no case has that in its name" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--again"], ["--only", "kda"], ["--limit", "9"], ["--folder", "DIR"]])
def test_the_page_alone_takes_no_flags_of_a_run(words, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["matrix", "page", *words])
    with pytest.raises(SystemExit) as caught:
        matrix.main()
    assert caught.value.code == 2 and f"{words[0]}: page trains nothing" in capsys.readouterr().err


def test_refusals_are_those_of_the_record():
    assert ask(CASES.values()) == RECORD.refusals, REMEDY


def test_the_record_holds_present_cases_only():
    stale = [name for name in RECORD.cases if name not in CASES or RECORD.of(CASES[name]) is None]
    assert not stale, f"{REMEDY}; these were other command lines: {stale}"


def test_the_page_says_what_the_record_says():
    text = page.PATH.read_text()
    assert page.with_tables(text, RECORD) == text, REMEDY


# -- cases -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("each", REPRESENTATIVE, ids=lambda each: each.id)
def test_case(each, runs):
    outcome = runs.outcome(each)
    assert outcome.result == EQUAL, outcome


@pytest.mark.slow
@pytest.mark.parametrize("each", [each for each in CASES.values() if recorded(each)], ids=lambda each: each.id)
def test_every_recorded_case(each, runs):
    outcome = runs.outcome(each)
    assert outcome.result == RECORD.of(each)["result"], outcome


# -- the machinery -----------------------------------------------------------------------------------------------------


def test_cells_and_their_states():
    """A cell is verified by the first case that is not refused, and by a record of the same command line only."""
    record, (first, second, *_) = Record(), pair_cases("attnres", "qk-clip")
    assert decide([first, second], record).state == NOT_VERIFIED
    measured = dict.fromkeys(first.compared, 1.23456e-7)
    record.add(first, Outcome(EQUAL, measured, first.compared))
    assert decide([first, second], record).state == VERIFIED
    assert record.of(first)["measured"]["loss"] == 1.2e-7 and "torch" in record.of(first)["versions"]
    for change in ({"words": first.layout.words + " --bf16"}, {"bounds": Bounds(loss=1e-8)}):
        other = replace(first, layout=replace(first.layout, **change))
        assert other.id == first.id and decide([other], record).text == "not run"
    record.add(first, Outcome(EQUAL, {"loss": 0.0}, {"loss": 2e-5}))  # less was compared then
    assert decide([first], record).text == "not run"
    for result in (DIFFERENT, FAILED):
        record.add(first, Outcome(result, measured, first.compared, "why"))
        assert decide([first, second], record) == decide([first], record)
        assert decide([first], record).state == NOT_VERIFIED and decide([first], record).text == f"{result}: why"
    record.add(first, Outcome(REFUSED, text="not together"))  # when the model was built
    record.refusals[second.id] = "not this way"
    cell = decide([first, second], record)
    assert (cell.state, cell.text) == (REFUSES, "not together")
    record.drop_others([second])
    assert not record.cases


def test_a_cell_without_cases_is_an_error():
    with pytest.raises(ValueError, match="a cell has no case: give table.py a layout"):
        decide([], Record())


def test_cases_from_the_table():
    alone = axis_cases("kda", "TP")[0]
    assert alone.features == ("kda", "gated-mla") and not alone.experts and alone.reference().ranks == 1
    assert axis_cases("kda", "EP")[0].experts and axis_cases("moonep", "TP")[0].experts
    both = case(["moonep", "attnres"], PAIRS[0])
    assert both.features == ("kda", "gated-mla", "attnres", "moonep")
    assert both.reference().features == ("kda", "gated-mla", "attnres"), "moonep computes the same model"
    assert axis_cases("kda", "resume")[0].digest != axis_cases("kda", "resume")[0].without_layout().digest
    assert len(list(pairs())) == len(FEATURES) * (len(FEATURES) - 1) // 2


def test_a_difference_is_found(runs):
    """The comparison itself: one element of one gradient, and one parameter, changed by a thousandth of the largest."""
    import torch

    each = REPRESENTATIVE[0]
    if not runs.place(each).exists():
        assert runs.outcome(each).result == EQUAL
    mine, reference = runs.place(each), runs.place(each.reference())
    for what in ("grads", "parameters"):
        path = mine / f"{what}0.pt"
        shards = torch.load(path, weights_only=False)
        name, _, _, values = next(shard for shard in shards if "experts" not in shard[0] and shard[3].dim() == 2)
        largest = values.abs().max()
        values.view(-1)[0] += 1e-3 * largest
        for other in mine.glob(f"{what}[1-9].pt"):  # the other rank's copy, or copies would be told apart
            theirs = torch.load(other, weights_only=False)
            next(shard for shard in theirs if shard[0] == name)[3].view(-1)[0] += 1e-3 * largest
            torch.save(theirs, other)
        torch.save(shards, path)
        assert gradients.assemble(mine, what).keys() == gradients.assemble(reference, what).keys()
        outcome = compare(each, mine, reference)
        assert outcome.result == DIFFERENT and name in outcome.text, outcome


def test_the_markers_are_needed(tmp_path):
    with pytest.raises(AssertionError, match="markers"):
        page.with_tables("# a page without them", Record())
    text = page.with_tables(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n", Record())
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "not run" in text and page.with_tables(text, Record()) == text
