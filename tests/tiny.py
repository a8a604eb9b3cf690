"""The flags of a run that takes a tenth of a second, for tests that need a run and not what it learns.

Of a flag that stands twice the last one counts: `[*tiny(), "--train.epochs=3"]`.
"""

HERE = ["--run.workers=0", "--run.report=off", "--run.device=cpu", "--train.precision=fp32"]
SIZES = ["--model.width=4", "--data.size=24", "--data.eval-resize=24", "--data.eval-size=24"]
SMALL = [*SIZES, "--train.global-batch=16"]


def tiny(classes: int = 10) -> list[str]:
    """Return flags of demo_classification for three batches of eight drawn images an epoch, on this CPU, unseen."""
    drawn = [f"--data.path=synthetic:classes={classes},samples=24,size=24", f"--data.classes={classes}"]
    return [*SIZES, *drawn, "--train.global-batch=8", *HERE, "--run.progress=off"]
