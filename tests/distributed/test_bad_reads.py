"""Two ranks of which one cannot read the checkpoint that rank 0 can: it says so, and the checkpoint stays.

warm.py runs main() of this file on every rank, which writes OUT/RANK.json.
"""

import dataclasses
import itertools
import json
import os
from pathlib import Path

import pytest
import warm

from sightline import api, config
from sightline.errors import SightlineError
from sightline.files import checkpoint_folder
from sightline.tasks.classification import Classification

HERE = Path(__file__).parent
FLAGS = """--run.workers=0 --run.device=cpu --run.threads=1 --run.progress=off --run.checkpoint-every-steps=2
--run.report=off --train.max-steps=8""".split()
losses = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class NanOnce(Classification):
    """Its fourth loss is not finite."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return dataclasses.replace(loss, total=loss.total * float("nan")) if next(losses) == 4 else loss


def main(out: Path) -> None:
    recipe, run = config.load(str(HERE / "faulty_ranks.py"), [*FLAGS, f"--run.out={out / 'run'}"])
    if out.name == "rewind":
        run = dataclasses.replace(run, on_nan="rewind")
        recipe = dataclasses.replace(recipe, task=NanOnce())
    if os.environ["RANK"] == "1":
        sound = checkpoint_folder.sha256_of
        checkpoint_folder.sha256_of = lambda file: (
            "0" if file.name == "model.safetensors" else sound(file)
        )  # a bad disk
    try:
        api.train(recipe, run)
        seen = [0, ""]
    except SightlineError as error:
        seen = [error.exit_code, str(error)]
    (out / f"{os.environ['RANK']}.json").write_text(json.dumps(seen))


@pytest.mark.parametrize(("where", "name"), [("resume", "ckpt-00000004"), ("rewind", "ckpt-00000002")])
def test_what_rank_0_can_read_is_not_moved_by_another(tmp_path: Path, where: str, name: str):
    out = tmp_path / where
    out.mkdir()
    if where == "resume":
        recipe, run = config.load(str(HERE / "faulty_ranks.py"), [*FLAGS, f"--run.out={out / 'run'}"])
        recipe = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, max_steps=4))
        api.train(recipe, run)
    warm.run(__file__, out, 2)
    (main_code, main_said), (code, said) = (json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1))
    file = out / "run" / "checkpoints" / name / "model.safetensors"
    assert (main_code, code) == (8, 4), (main_said, said)
    assert said.startswith("rank 1 on ") and f"{file} is damaged" in said and "stays in place" in said
    assert main_said == f"rank 1 ended with exit 4: {said}"
    assert file.is_file() and not list(file.parent.parent.glob("*.corrupt*"))
