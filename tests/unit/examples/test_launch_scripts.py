"""The launch scripts for GPUs: their dry runs, and the start of a SLURM job with stand-ins for SLURM's commands.

A dry run lets features and Megatron check every flag as in a job of that size. The stand-in for srun starts a launcher
per node, as srun does, so that a job of two nodes really trains, on CPU processes.
"""

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest

from k3_plugins.data import prepare

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "examples" / "kimi_k3"


def start(script, *words, path=None, **variables):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    if path is not None:
        environment["PATH"] = f"{path}:{environment['PATH']}"
    command = ["bash", str(SCRIPTS / script), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT, env=environment, check=False)


def fullest(text):
    """(GB on the fullest rank, the layout in words)."""
    (size,) = re.findall(r"([0-9.]+) GB on pipeline rank \d+: fits in 80 GB", text)
    (layout,) = re.findall(r"Parallel layout (.*?);", text)
    return float(size), layout


def readme_rows():
    """Stage -> (GB, layout) of the table that justifies the sizes."""
    rows = re.findall(
        r"^\| `(\w+)` \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| \d+ of \d \| ([0-9.]+) \|",
        (SCRIPTS / "README.md").read_text(),
        re.MULTILINE,
    )
    names = ("TP", "CP", "PP", "VPP", "EP", "DP")
    return {
        stage: (float(size), " ".join(f"{n} {v}" for n, v in zip(names, sizes, strict=True)))
        for stage, *sizes, size in rows
    }


SLOW_STAGES = [pytest.param(stage, marks=pytest.mark.slow) for stage in ("64k", "256k", "1m")]


@pytest.mark.parametrize("stage", ["8k", *SLOW_STAGES])
def test_the_published_model_fits_as_the_table_says(stage, tmp_path):
    done = start("23_slurm_kimi_k3.sh", "--dry-run", STAGE=stage, K3_RUN=str(tmp_path / "run"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert fullest(done.stdout) == readme_rows()[stage]
    assert "per-head-muon, pipeline-zero2" in done.stdout.replace("\n", " ").replace("  ", " ")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "sizes"),
    [
        *((name, {}) for name in """03_pretrain_gpu.sh 04_resume.sh 06_finetune_cpu.sh 08_vision_cpu.sh
            20_everything_cpu.sh 21_node_8gpu.sh 22_slurm_kimi_linear.sh""".split()),
        ("03_pretrain_gpu.sh", {"NNODES": "4", "TP": "2", "PP": "4"}),  # the script's own example
    ],
)
def test_other_dry_runs_start_and_fit(script, sizes):
    done = start(script, "--dry-run", **sizes)
    assert done.returncode == 0 and fullest(done.stdout), done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("script", ["05_quantize_cpu.sh", "07_compare_cpu.sh", "09_draft_cpu.sh"])
def test_what_has_no_dry_run_says_so_and_starts_nothing(script, tmp_path):
    done = start(script, "--dry-run", "cosine", "wsd", K3_RUN=str(tmp_path / "run"))
    assert done.returncode == 2 and "no dry run" in done.stderr and not (tmp_path / "run").exists()


def test_a_stage_that_is_not_there_is_named():
    done = start("23_slurm_kimi_k3.sh", "--dry-run", STAGE="2k")
    assert done.returncode == 2 and "STAGE=2k is none of 8k, 64k, 256k, 1m" in done.stderr


@pytest.fixture
def slurm(tmp_path):
    """A folder with `scontrol` and `srun` for a job of two nodes on this machine."""
    folder = tmp_path / "bin"
    folder.mkdir()
    commands = {
        "scontrol": 'printf "127.0.0.1\\nother\\n"',
        # every "node" is a process group of its own with SLURM's variables
        "srun": 'shift\nfor node in 0 1; do SLURM_NODEID=$node "$@" & pids+=($!); done\n'
        "for pid in ${pids[@]}; do wait $pid || exit $?; done",
    }
    for name, body in commands.items():
        file = folder / name
        file.write_text(f"#!/usr/bin/env bash\n{body}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return folder


@pytest.mark.slow
def test_two_nodes_train_under_slurm(slurm, tmp_path):
    data = [str(SCRIPTS), "--output", str(tmp_path / "data"), "--include", "*.sh", "--validation-fraction", "0.2"]
    assert prepare.main([*data, "--seed", "1"]) == 0
    model = "--k3-model kimi_linear_tiny --k3-platform cpu --use-cpu-initialization --seq-length 64"
    cpu = "--no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion --num-workers 0"
    steps = "--max-position-embeddings 64 --train-iters 2 --eval-iters 0 --log-interval 1 --lr-warmup-fraction 0"
    done = start(
        "22_slurm_kimi_linear.sh", *model.split(), *cpu.split(), *steps.split(), path=slurm,
        DATA=str(tmp_path / "data"), K3_RUN=str(tmp_path / "run"), SLURM_NNODES="2", SLURM_JOB_NODELIST="two",
        SLURM_SUBMIT_DIR=str(ROOT), GPUS_PER_NODE="1", PP="1", EP="2", LAYOUT="", GLOBAL_BATCH="4", MASTER_PORT="29731",
        FEATURES="kda,gated-mla,quantile-balancing,moonep,per-head-muon",
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-9000:]
    assert len(re.findall(r"iteration +2/ +2 .* lm loss: [0-9.E+-]+", done.stdout)) == 1
