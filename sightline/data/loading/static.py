"""Static batches: training batches written to files once, and a dataset that replays them with the same bits anywhere.

For debugging, and for comparing devices or versions of the augmentation. `dump` writes the batches of a run with this
seed and batch size, augmented and normalised in fp32 (`sightline prepare static`); `--data.static DIR` replays them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.numpy import save

from sightline.data.loading.order import TrainOrder
from sightline.errors import BadData, UsageError
from sightline.files.tensors import read_tensors
from sightline.files.typed_json import read_json, typed
from sightline.files.whole import replace_text, replaced
from sightline.hardware import devices
from sightline.hardware.devices import Device
from sightline.parts import Arrays, Batch, Bound, DataConfig, Dataset, DataSpec
from sightline.terminal.progress import Progress

LastBatch = Literal["drop", "pad", "wrap"]
_FACTS = "batches.json"  # written last, when the folder is complete
_FORMAT = 1
_MAX_FACTS_BYTES = 8 * 2**20  # 100,000 classes take 3 MB


def dump(
    data: DataConfig, out: Path, batch: int, steps: int, seed: int, progress: Progress, last: LastBatch = "drop"
) -> dict[str, int]:
    """Write the first `steps` training batches into a new folder; `image` has its channels last."""
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty; choose another --out")
    bound = data.open("train", seed).bind(devices.select("cpu"), batch)
    order = TrainOrder(len(bound.dataset), batch, seed, last, samples_per_item=bound.samples_per_item)
    out.mkdir(parents=True, exist_ok=True)
    for step in range(steps):
        epochs, indices = order.batch(step)
        items = [bound.load(*key) for key in zip(epochs.tolist(), indices.tolist(), strict=True)]
        loaded = {key: torch.from_numpy(np.stack([item[key] for item in items])) for key in items[0]}
        drawn = bound.draw_batch(*divmod(step, order.steps_per_epoch))
        loaded |= {key: torch.as_tensor(value) for key, value in drawn.items()}
        rows = torch.from_numpy(indices.repeat(bound.samples_per_item))
        finished = {**bound.finish(loaded, torch.float32), "index": rows}
        finished["image"] = finished["image"].movedim(1, -1)
        with replaced(out / _file(step)) as file:
            file.write(save({key: np.ascontiguousarray(t.numpy()) for key, t in finished.items()}))
        progress("batches", step + 1, steps)
    facts = {"format": _FORMAT, "spec": bound.dataset.spec.to_json(), "batch": batch, "batches": steps, "seed": seed}
    replace_text(out / _FACTS, json.dumps(facts, indent=1) + "\n")
    return {"batches": steps, "samples": steps * batch}


def _file(step: int) -> str:
    return f"batch-{step:06d}.safetensors"


class StaticDataset(Dataset):
    """Static batches: batch k of every epoch is file k. Each of several ranks replays all files."""

    def __init__(self, folder: Path):
        self.folder = folder
        facts = _read_facts(folder)
        self.spec, self.batch, self.batches = facts["spec"], facts["batch"], facts["batches"]
        first = self._read(0)
        self.layout = {
            key: (array.shape[1:], str(array.dtype))
            for key, array in first.items()
            if array.ndim and key != "index"  # the loader adds that one
        }
        self.files: list[Path] = []
        digest = hashlib.sha256((folder / _FACTS).read_bytes())
        for step in range(self.batches):  # a damaged number may be anything: the first file that is missing ends it
            path = folder / _file(step)
            if not path.is_file():
                raise BadData(f"{path} is missing; {_FACTS} lists {self.batches} batches: write them again")
            digest.update(f"{path.name} {path.stat().st_size}".encode())
            self.files.append(path)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return self.batch * self.batches

    def name(self, index: int) -> str:
        return f"{_file(index // self.batch)}:{index % self.batch}"

    def bind(self, device: Device, global_batch: int) -> Bound:
        """Bind to the files: `draw_batch` reads whole batches, so workers load nothing and no key is copied."""
        return Bound(
            self,
            self.layout,
            self.load,
            self.finish,
            self.draw_batch,
            host_keys=frozenset(self.layout),
            check_batch=self.check_batch,
        )

    def check_batch(self, items: int) -> None:
        """Raise UsageError unless a device takes batches of the size that the files hold."""
        if items != self.batch:
            raise UsageError(
                f"{self.folder} has batches of {self.batch} samples, this run takes {items} on a device; "
                f"use --train.global-batch {self.batch} on one device, or write others with `sightline prepare static`"
            )

    def load(self, epoch: int, index: int) -> Arrays:
        """Load nothing."""
        return {}

    def draw_batch(self, epoch: int, step: int) -> Arrays:
        """Read a whole batch."""
        return self._read(step % self.batches)

    def finish(self, batch: Batch, dtype: torch.dtype) -> Batch:
        """Move the channels to the front."""
        return {**batch, "image": batch["image"].movedim(-1, 1).to(dtype)}

    def _read(self, step: int) -> Arrays:
        path = self.folder / _file(step)
        try:
            found = {name: tensor.numpy() for name, tensor in read_tensors(path).items()}
        except (OSError, ValueError, TypeError) as error:  # TypeError: a type that NumPy does not have
            raise BadData(f"{path} cannot be read: {error}; write the batches again") from error
        if "image" not in found or found["image"].shape[:1] != (self.batch,):
            raise BadData(f"{path} does not hold {self.batch} images; write the batches again")
        return found


def _read_facts(folder: Path) -> dict[str, Any]:
    try:
        facts = typed(read_json(folder / _FACTS, _MAX_FACTS_BYTES), dict[str, Any])
        batch, batches = (typed(facts.get(name), int) for name in ("batch", "batches"))
        if facts.get("format") == _FORMAT and batch > 0 and batches > 0:
            return {"spec": DataSpec.from_json(facts.get("spec")), "batch": batch, "batches": batches}
    except OSError as error:
        raise BadData(
            f"{folder / _FACTS} cannot be read: {error.strerror}; write batches with `sightline prepare static`"
        ) from error
    except ValueError as error:
        raise BadData(f"{folder / _FACTS} is damaged ({error}); write the batches again") from error
    raise BadData(f"{folder / _FACTS} is of another format; write the batches again with this version")
