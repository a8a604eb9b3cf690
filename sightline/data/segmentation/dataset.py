"""Prepared volumes: training sees random crops of them, evaluation every slice or volume.

A 2D network sees slices: a training item is one crop of a volume, as deep as its share of the batch, and gives that
many samples. A 3D network sees patches: a training item is one of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from sightline.data.augment.segmentation import CARRIED, Params, cut, view
from sightline.data.loading import cache as caching
from sightline.data.loading.cache import ImageCache
from sightline.data.loading.device_cache import DeviceCache
from sightline.data.segmentation.config import SegmentationData
from sightline.data.sources import VolumeSource, spread
from sightline.data.volumes.reader import VolumeReader, check_label, check_whole
from sightline.errors import BadData, BadSample, UsageError
from sightline.hardware.devices import Device
from sightline.parts import (
    Arrays,
    Batch,
    Bound,
    Dataset,
    Layout,
    Split,
    SplitFacts,
)

_LARGEST_CACHED = 2**32 - 1  # bytes of one volume
_MOST_COUNTED, _MOST_VOXELS = 20, 2**25  # volumes, and their voxels, that the report of a run counts


class SegmentationDataset(Dataset):
    """One split of the volumes."""

    def __init__(self, config: SegmentationData, source: VolumeSource, split: Split, seed: int):
        self.config = config
        self.augmentation = config.augmentation
        self.source = source
        self.split = split
        self.is_training = split == "train"
        self.seed = seed
        self.fingerprint, self.files = source.fingerprint, source.files
        self.spec = source.spec
        self.shapes = np.array([source.shape(i) for i in range(len(source))], np.int64)  # (volumes, 3)
        if not len(self.shapes):
            raise BadData(f"{config.path} has no volumes for {split}; use another --data.fold or fewer --data.folds")
        if len(self.spec.size) != config.dim:
            raise BadData(f"{config.path} has patches of {self.spec.size}, the recipe has dim={config.dim}")
        self.first_slice = np.concatenate([[0], np.cumsum(self.shapes[:, 0])])  # of each volume, over the whole split
        if config.dim == 2:
            self._check_patches()

    def _check_patches(self) -> None:
        odd = np.flatnonzero((self.shapes[:, 1:] != self.spec.size).any(1))
        if len(odd):
            raise BadData(
                f"{self.source.name(int(odd[0]))} of {self.config.path} has slices of "
                f"{tuple(self.shapes[odd[0], 1:].tolist())}, expected {self.spec.size}; prepare the data again"
            )

    def __len__(self) -> int:
        if self.is_training or self.config.dim == 3:
            return len(self.source)
        return int(self.first_slice[-1])

    def name(self, index: int) -> str:
        if self.is_training or self.config.dim == 3:
            return self.source.name(index)
        volume, place = self._slice(index)
        return f"{self.source.name(volume)} slice {place}"

    def facts(self, is_late: Callable[[], bool]) -> SplitFacts:
        """Count the voxels of every class in some volumes."""
        counts, counted, voxels = np.zeros(len(self.spec.classes), np.int64), 0, 0
        for index in spread(len(self.shapes), _MOST_COUNTED):
            voxels += int(self.shapes[index].prod())
            if is_late() or (counted and voxels > _MOST_VOXELS):
                break
            with contextlib.suppress(BadSample):
                label = self.source.label(index)
                check_label(self.source, index, label)
                for plane in label:  # one by one: NumPy counts in eight times their memory
                    counts += np.bincount(plane.reshape(-1), minlength=len(counts))
                counted += 1
        sizes, per_class = tuple(map(tuple, self.shapes.tolist())), tuple(counts.tolist())
        return SplitFacts(len(self.shapes), "volumes", "voxels", per_class, counted, sizes)

    def samples_per_item(self, global_batch: int) -> int:
        if not self.is_training or self.config.dim == 3:
            return 1
        return global_batch // self.config.volumes_of(global_batch, int(self.shapes[:, 0].min()))

    def bind(self, device: Device, global_batch: int) -> Bound:
        """Decide how deep crops are, where they are augmented, and whether volumes are kept in memory."""
        if self.config.cache != "gpu":
            return self._bind(device, global_batch, *self._open_cache())
        if device.kind == "cpu":
            raise UsageError("--data.cache gpu: this run trains on the CPU; use --data.cache ram")
        return self.bind_to_memory(device, global_batch)

    def bind_to_memory(self, device: Device, global_batch: int) -> Bound:
        """Keep all volumes in the memory of the device; load the numbers of crops alone, `decode` cuts them out."""
        what = f"volumes of {self.split}"
        cache = DeviceCache(device, what, self._bytes_of, self._as_bytes, len(self.shapes), self.config.on_bad_sample)
        host = self._bind(device, global_batch, None, cache.note)
        shape = host.layout["label"][0]
        crop = shape if len(shape) == 3 else (1, *shape)
        place: Layout = {"anchor": ((3,), "int64"), "cached": ((), "int64")}
        return replace(
            host,
            layout={**host.layout, **place},
            load=partial(self._load_numbers, cache, crop, set(host.layout) & {*CARRIED}),
            decode=partial(self._cut_from_memory, cache, crop),
            on_host=host,
            host_keys=frozenset({"image", "label", *place}),
            parts=1,  # a sample is some numbers, drawn in less time than a message takes
            cache=cache,
        )

    def _bind(self, device: Device, global_batch: int, cache: ImageCache | None, cache_note: str) -> Bound:
        config, each = self.config, self.samples_per_item(global_batch)
        volumes = VolumeReader(self.source, cache, checks=not self.is_training)
        if not self.is_training:
            load = partial(self._load_slice if config.dim == 2 else self._load_volume, volumes)
            notes = tuple(filter(None, [cache_note]))
            return Bound(self, self._evaluation_layout(), load, self.finish, cache=cache, notes=notes)
        crop = (each, *self.spec.size) if config.dim == 2 else self.spec.size
        wants_device = config.augment_on == "device" or (config.augment_on == "auto" and device.kind != "cpu")
        on_device = wants_device and config.augment == "on"
        layout: Layout = {"image": ((self.spec.channels, *crop), "float32"), "label": (crop, "uint8")}
        if on_device:
            carried = self.augmentation.carried(Params(), crop)
            layout = {**layout, **{key: (value.shape, str(value.dtype)) for key, value in carried.items()}}
        device_note = f"crops are augmented on {device.name()}" if on_device else ""
        return Bound(
            self,
            layout,
            partial(self._load_crop, volumes, crop, on_device),
            self.finish,
            samples_per_item=each,
            cache=cache,
            notes=tuple(filter(None, [self._nvol_note(global_batch), device_note, cache_note])),
        )

    def _nvol_note(self, global_batch: int) -> str:
        """Say why a batch is made of more volumes than `nvol`; "" if it is not."""
        wanted, nvol = max(1, self.config.nvol), global_batch // self.samples_per_item(global_batch)
        if self.config.dim == 3 or nvol == wanted or self.shapes[:, 0].max() == 1:  # images have no slices to share
            return ""
        shallowest = int(self.shapes[:, 0].argmin())
        name, slices = self.source.name(shallowest), self.shapes[shallowest, 0]
        return f"a batch of {global_batch} slices takes {nvol} volumes, more than data.nvol={wanted}: " + (
            f"every volume of a batch gives equally many slices, and {name} has only {slices}"
            if global_batch % wanted == 0
            else f"{wanted} does not divide the batch"
        )

    def _evaluation_layout(self) -> Layout:
        if self.config.dim == 2:
            sides: tuple[int, ...] = self.spec.size
            extent: Layout = {}
        else:
            sides, extent = tuple(self.shapes.max(0).tolist()), {"extent": ((3,), "int64")}
        image = ((self.spec.channels, *sides), "float32")
        return {"image": image, "label": (sides, "uint8"), "volume": ((), "int64"), **extent}

    def _open_cache(self) -> tuple[ImageCache | None, str]:
        """Return memory for all volumes if they are to be kept, and a note for the user."""
        mode, voxels = self.config.cache, self.shapes.prod(1)
        room = -(-voxels * (4 * self.spec.channels + 1) // 64) * 64  # so that each begins at a multiple of a float
        largest = int(room.max())
        if mode == "ram" and largest > _LARGEST_CACHED:
            raise UsageError(f"--data.cache ram: a volume takes {largest} bytes, more than 4 GiB; use --data.cache off")
        if mode == "auto" and (largest > _LARGEST_CACHED or self.config.path.startswith("synthetic:")):
            return None, ""
        return caching.open_cache(mode, [caching.exact(room, "volumes")], self.split)

    def _load_crop(
        self, volumes: VolumeReader, crop: tuple[int, ...], on_device: bool, epoch: int, index: int
    ) -> Arrays:
        """Cut a random crop out of a volume; augment it, or send along the numbers with which the device does."""
        volume, classes = volumes.read(index)
        params = self.augmentation.draw(self.seed, epoch, index, classes, crop, self.config.dim)
        # A view will do for a crop that is copied to the batch as it is.
        take = view if on_device else cut
        image, label = take(volume, params.anchor, crop), take(classes, params.anchor, crop)
        check_label(self.source, index, label)
        if on_device:
            return {"image": image, "label": label, **self.augmentation.carried(params, crop)}
        image, label = self.augmentation.apply(params, image, label)
        return {"image": image, "label": label}

    def _load_slice(self, volumes: VolumeReader, epoch: int, index: int) -> Arrays:
        volume, place = self._slice(index)
        image, label = volumes.read(volume)
        return {"image": image[:, place], "label": label[place], "volume": np.asarray(volume)}

    def _load_volume(self, volumes: VolumeReader, epoch: int, index: int) -> Arrays:
        image, label = volumes.read(index)
        sides = tuple(self.shapes.max(0).tolist())
        return {
            "image": cut(image, (0, 0, 0), sides),
            "label": cut(label, (0, 0, 0), sides),
            "volume": np.asarray(index),
            "extent": self.shapes[index],
        }

    def _bytes_of(self, volume: int) -> tuple[int]:
        return (int(self.shapes[volume].prod()) * (4 * self.spec.channels + 1),)

    def _as_bytes(self, volume: int) -> tuple[np.ndarray, None]:
        """Return the bytes of a volume, then those of its label."""
        image, label = self.source.image(volume), self.source.label(volume)
        if not self.is_training:
            check_whole(self.source, volume, image, label)
        return np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in (image, label)]), None

    def _load_numbers(
        self, cache: DeviceCache, crop: tuple[int, ...], carried: set[str], epoch: int, index: int
    ) -> Arrays:
        """Draw a crop of a volume that lies in the memory of the device, or find a slice in it."""
        if not self.is_training and self.config.dim == 2:
            volume, place = self._slice(index)
            cache.check(volume)
            return {"anchor": np.array([place, 0, 0]), "cached": np.asarray(volume), "volume": np.asarray(volume)}
        cache.check(index)
        cached = np.asarray(index)
        if not self.is_training:
            return {"anchor": np.zeros(3, np.int64), "cached": cached, "volume": cached, "extent": self.shapes[index]}
        classes = self.source.label(index)
        params = self.augmentation.draw(self.seed, epoch, index, classes, crop, self.config.dim)
        check_label(self.source, index, cut(classes, params.anchor, crop))
        numbers = self.augmentation.carried(params, crop) if carried else {}
        return {"anchor": np.asarray(params.anchor), "cached": cached, **numbers}

    def _cut_from_memory(self, cache: DeviceCache, crop: tuple[int, ...], slot: Batch, batch: Batch) -> Batch:
        """Cut the crops of a batch out of the volumes in the memory of the device; of padding nothing is cut."""
        channels = self.spec.channels
        memory, starts = cache.memory(slot["cached"])
        shapes = torch.from_numpy(self.shapes)[slot["cached"]]
        is_item = slot["valid"] if "valid" in slot else slot["index"] >= 0
        numbers = torch.cat([slot["anchor"], shapes, starts[:, None], is_item[:, None]], 1)  # one copy, of int64
        numbers = numbers.to(batch["index"].device, non_blocking=True)
        offset, is_inside = _offsets(numbers[:, :3], numbers[:, 3:6], crop)
        is_inside &= numbers[:, 7, None, None, None] > 0
        start, voxels = numbers[:, 6], numbers[:, 3:6].prod(1)
        # Floats begin at multiples of four; what lies outside of a volume is read at its beginning, and not used.
        channel = torch.arange(channels, device=offset.device)
        first = (start[:, None] // 4 + channel * voxels[:, None])[:, :, None, None, None]
        found = memory.view(torch.float32).take(first + offset[:, None])
        image = torch.where(is_inside[:, None], found, 0.0)
        label = memory.take((start + 4 * channels * voxels)[:, None, None, None] + offset)
        label = torch.where(is_inside, label, label.new_zeros(()))
        if slot["label"].ndim == 3:  # slices
            image, label = image[:, :, 0], label[:, 0]
        return {**batch, "image": image, "label": label}

    def _slice(self, index: int) -> tuple[int, int]:
        """Return the volume that a slice of the split belongs to, and its place in it."""
        volume = int(np.searchsorted(self.first_slice, index, side="right")) - 1
        return volume, index - int(self.first_slice[volume])

    def finish(self, batch: Batch, dtype: torch.dtype) -> Batch:
        """Augment crops that came with their numbers, and turn them into what the network sees."""
        image, label = batch["image"], batch["label"]
        numbers = {key: batch[key] for key in CARRIED if key in batch}
        if numbers:
            # The step calls this within its own region, in which products would be rounded to half precision.
            with torch.autocast(image.device.type, enabled=False):
                image, label = self.augmentation.finish(image, label, numbers, self.config.dim)
        image, label = image.to(dtype), label.long()
        if self.is_training and self.config.dim == 2:
            image = image.permute(0, 2, 3, 4, 1).flatten(0, 1).contiguous()  # (batch * depth, height, width, channels)
            image, label = image.permute(0, 3, 1, 2), label.flatten(0, 1)
        elif image.ndim == 4:
            image = image.contiguous(memory_format=torch.channels_last)
        else:
            image = image.contiguous(memory_format=torch.channels_last_3d)
        rest = {key: value for key, value in batch.items() if key not in numbers}
        return {**rest, "image": image, "label": label}


def _offsets(anchor: Tensor, shape: Tensor, crop: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return, for each voxel of crops (rows, depth, height, width), its place in its volume and whether that is in it;
    places outside are 0."""
    offset = torch.zeros((), dtype=torch.int64, device=anchor.device)
    is_inside = torch.ones((), dtype=torch.bool, device=anchor.device)
    for axis, length in enumerate(crop):
        place = anchor[:, axis, None] + torch.arange(length, device=anchor.device)
        side = shape[:, axis, None]
        as_axis = (len(place), *(length if other == axis else 1 for other in range(3)))
        is_inside = is_inside & ((place >= 0) & (place < side)).view(as_axis)
        offset = offset * side[:, :, None, None] + place.view(as_axis)
    return offset.where(is_inside, 0), is_inside
