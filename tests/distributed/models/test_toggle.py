"""Turning one feature off or on in a resumed job, everything else on: what docs/troubleshooting.md says happens."""

import json
import re
from pathlib import Path

import pytest

from tests.distributed.models.test_everything import COMMON, DOOR, FEATURES, POLICY, TOLERANCE, make_data
from tests.harness import losses
from tests.harness.k3_model import CPU
from tests.harness.launch import launch

PAGE = Path(__file__).parents[3] / "docs" / "troubleshooting.md"
ROWS = re.findall(r"^\| `([\w-]+)` \| (\w+) \| (\w+) \|$", PAGE.read_text(), re.MULTILINE)
LAYOUT = """--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 --expert-model-parallel-size 2
    --expert-tensor-parallel-size 1 --use-distributed-optimizer"""
OWN_FLAGS = {
    "activation-manager": ["--activation-policy", POLICY],
    "vision-bubble": ["--vision-bubble-times", "1,2,1,2"],
    "attnres": ["--attn-res-two-phase", "off"],
    "per-head-muon": ["--muon-fp32-matmul-prec", "high"],
}
AT = 3


def test_the_page_has_every_feature():
    assert [name for name, *_ in ROWS] == FEATURES


class Job:
    """The job of `test_everything` with some of its features."""

    def __init__(self, root):
        self.root, self.done = root, 0
        common = " ".join(COMMON).replace("--muon-fp32-matmul-prec high", "")
        self.words = [*CPU, *common.split(), *make_data(root / "data"), "--eval-iters", "0"]
        self.words += LAYOUT.split()

    def run(self, features, flags, check=True):
        own = [word for name in features for word in OWN_FLAGS.get(name, [])]
        self.done += 1
        words = [*self.words, "--k3-plugins", ",".join(features), *own, *flags.split()]
        return launch(DOOR, words, nprocs=4, records=self.root / f"run{self.done}", timeout=280, check=check)

    def save(self, name, features):
        """A checkpoint of step 3, and the steps behind it in the job that is left as it was."""
        flags = f"--save {self.root}/{name} --save-interval {AT} --exit-interval {AT}"
        self.run(features, flags)
        return losses.read(self.run(features, f"--load {self.root}/{name} --exit-interval {AT + 2}").records)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return Job(tmp_path_factory.mktemp("toggle"))


@pytest.fixture(scope="module")
def everything(job):
    return job.save("everything", FEATURES)


@pytest.fixture(scope="module")
def bare(job, everything):
    """Only the features that decide the parameters, so that each of the others can join."""
    return job.save("bare", [name for name, off, _ in ROWS if off == "refused" and name != "per-head-muon"])


def continues(run, expected):
    steps = losses.read(run.records)
    assert sorted(steps) == [AT + 1, AT + 2]
    assert losses.relative_difference(steps, expected) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("name", "off"), [(name, off) for name, off, _ in ROWS])
def test_off(name, off, job, everything):
    features = [other for other in FEATURES if other not in (name, *(["vision-bubble"] if name == "moonvit" else []))]
    resume = f"--load {job.root}/everything --exit-interval {AT + 2}"
    run = job.run(features, resume, check=off == "continues")
    if off == "continues":
        continues(run, everything)
    else:
        assert run.rc == 2 and name in run.logs[0] and "Traceback" not in run.logs[0], run.tail()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "on"), [(name, on) for name, _, on in ROWS if on == "continues"])
def test_on_continues(name, on, job, bare):
    base = [other for other, off, _ in ROWS if off == "refused" and other != "per-head-muon"]
    features = [other for other in FEATURES if other in (*base, name)]
    continues(job.run(features, f"--load {job.root}/bare --exit-interval {AT + 2}"), bare)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _, on in ROWS if on == "refused"])
def test_on_is_refused(name, job, everything, bare):
    if name == "per-head-muon":  # AdamW's state, as it is
        base = [other for other, off, _ in ROWS if off == "refused"]
        run = job.run(base, f"--load {job.root}/bare", check=False)
    else:  # a checkpoint that says of itself that it was saved without
        (file,) = (job.root / "everything").rglob("k3_manifest.json")
        written = file.read_text()
        manifest = json.loads(written)
        del manifest["features"][name]
        file.write_text(json.dumps(manifest))
        try:
            run = job.run(FEATURES, f"--load {job.root}/everything", check=False)
        finally:
            file.write_text(written)
    assert run.rc == 2 and name in run.logs[0] and "Traceback" not in run.logs[0], run.tail()
