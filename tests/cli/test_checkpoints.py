"""Which checkpoints twelve epochs leave behind, and that the same command goes on from the newest."""

import json
from pathlib import Path

from sightline import cli

TINY = """train demo_classification --model.width=4 --data.path=synthetic:classes=10,samples=16,size=16 --data.size=16
    --data.eval-resize=16 --data.eval-size=16 --train.global-batch=8 --train.precision=fp32 --train.epochs=14
    --run.workers=0 --run.device=cpu --run.progress=off""".split()


def listed(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("ckpt-*"))


def test_twelve_epochs_keep_the_newest_ten_and_the_best(tmp_path: Path):
    run = tmp_path / "run"
    command = [*TINY, "--run.keep=10", f"--run.out={run}"]
    assert cli.main([*command, "--train.max-steps=24"]) == 0
    events = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == list(range(2, 25, 2))
    best = (run / "checkpoints" / "best").read_text().strip()
    newest = [f"ckpt-{step:08d}" for step in range(6, 25, 2)]
    assert len(newest) == 10 and listed(run) == sorted({*newest, best})
    assert (run / "checkpoints" / "latest").read_text().strip() == "ckpt-00000024"

    assert cli.main([*command, "--train.max-steps=0"]) == 0
    events = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    (resumed,) = (event for event in events if event["event"] == "resume")
    assert resumed["step"] == 24
    newest = [f"ckpt-{step:08d}" for step in range(10, 29, 2)]
    assert set(newest) <= set(listed(run)) and len(listed(run)) <= 11


def test_one_is_kept_besides_the_best(tmp_path: Path):
    run = tmp_path / "run"
    assert cli.main([*TINY, "--run.keep=1", "--train.max-steps=24", f"--run.out={run}"]) == 0
    best = (run / "checkpoints" / "best").read_text().strip()
    assert listed(run) == sorted({"ckpt-00000024", best})
