"""Every recipe's network is exported at its real size: what `sightline export` writes computes the same."""

import runpy
from pathlib import Path

import pytest

from sightline import recipes
from sightline.export.run import ExportOptions, export

pytest.importorskip("onnxscript", reason="needs the extra export: onnx, onnxscript, onnxruntime")
pytest.importorskip("onnxruntime", reason="needs the extra export")
BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "export.py"
THIN = {"unet3d": ["--model.width=4"]}  # a patch of 128^3 takes a minute at full width
LOW = {name: ["--task.score-threshold=0.02"] for name in recipes.names() if "detection" in name or "ssd" in name}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["onnx", "torch-export"])
@pytest.mark.parametrize("name", recipes.names())
def test_an_exported_recipe_computes_the_same(name: str, kind: str, tmp_path: Path):
    """`export` raises where the largest relative difference is above 1e-4, or boxes do not match."""
    said: list[str] = []
    write_checkpoint = runpy.run_path(str(BENCHMARK))["write_checkpoint"]
    run = write_checkpoint(name, tmp_path / "ckpt", [*THIN.get(name, []), *LOW.get(name, [])])
    path = export(str(run), ExportOptions(kind), say=said.append)
    assert path.stat().st_size > 1e5 and float(said[1].rsplit(" ", 1)[1]) <= 1e-4
    if name in LOW:
        assert int(said[2].split()[2]) > 0, said
