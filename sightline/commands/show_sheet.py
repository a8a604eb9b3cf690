"""`sightline show`: open the training data of a recipe or a run and draw its first samples. Builds no network."""

from __future__ import annotations

import io
from pathlib import Path

from sightline import terminal
from sightline.data.loading.loader import BadSamples
from sightline.engine.orders import train_order_of
from sightline.files.whole import write_whole
from sightline.hardware import devices
from sightline.hardware.world import World
from sightline.recipe.recipe import Recipe, Run
from sightline.report.samples import MARK, draw_samples, encoder_of, refuse_other_file, sheet

FILE = "samples.png"
MOST_VALUES = 2**27  # sixteen patches of 128 x 128 x 128 voxels with four channels take some seconds


def draw_sheet(recipe: Recipe, run: Run, folder: Path | None, out: Path | None) -> tuple[Path, str]:
    """Write the sheet of a recipe, or of the run in `folder`; return where it lies, and what is on it in words."""
    path = out or (folder / FILE if folder else Path(FILE))
    encoder = encoder_of(path)
    refuse_other_file(path)
    data = recipe.data.in_run(folder or Path(run.out)) if folder or run.out else recipe.data
    dataset = data.open("train", recipe.train.seed)
    device = devices.select("auto" if folder else run.device)  # a run may come from a machine with others
    bound = dataset.bind(device, recipe.train.global_batch)
    order = train_order_of(recipe.train, bound, World())
    bad = BadSamples(
        data.on_bad_sample,
        data.max_bad_samples,
        lambda each: terminal.say(f"warning: sample skipped: {each.name}: {each.reason}"),
    )
    drawn = draw_samples(bound, order, recipe.task.for_data(dataset.spec), bad, MOST_VALUES)
    said = f"{drawn.words()}; seed {recipe.train.seed}"
    packed = io.BytesIO()
    sheet(drawn, f"{recipe.name}: {said}").save(packed, **encoder)
    write_whole(path, lambda temporary: temporary.write_bytes(packed.getvalue() + MARK))
    return path, said
