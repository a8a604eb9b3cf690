"""The fields of augmentation, which data configs inherit: values and rules alone, without torch and NumPy.

Each task's Augmentation beside this file inherits them too, and does what they say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from sightline.errors import UsageError
from sightline.recipe.part import Above, AtLeast, AtMost, Part, not_compared

# The TensorFlow originals see values in 0..255 minus this colour, undivided. `mean` and `std` are of values in 0..1.
TF_MEAN = (123.68 / 255, 116.78 / 255, 103.94 / 255)
TF_STD = (1 / 255, 1 / 255, 1 / 255)
COVERED_ONE_IN = 10  # crop=tf: min_object_covered 0.1, with the whole image as the only object

_CHANCE = AtMost(1, "it is a probability")
_SIDE = AtLeast(1, "it is a length in pixels, e.g. 224")
_ALPHA = AtLeast(0, "it is the alpha of a Beta distribution: 0 is off, 0.2 is usual")
_STD = Above(0, "three positive numbers, e.g. 0.229 0.224 0.225")
_RANGES = (
    "zoom_range",
    "rotation_range",
    "noise_std",
    "blur_sigma",
    "brightness_range",
    "contrast_range",
    "gamma_range",
)


@dataclass(frozen=True)
class ClassificationFields(Part):
    """Settings: how images become the squares that a classifier trains and is evaluated on."""

    part = "data"

    augment: Literal["on", "off"] = "on"
    """off: no randomness in training; images are seen as in evaluation, but at `size`."""
    crop: Literal["area", "tf", "shift"] = "area"
    """area: uniform area, log-uniform ratio, as torchvision; tf: uniform ratio, uniform height, at least a tenth of
    the image, as TensorFlow's sample_distorted_bounding_box. With tf, sides and offsets in evaluation are rounded down
    to whole pixels, as in the TensorFlow originals. shift: a square of the image as it is resized in evaluation, up to
    crop_padding pixels beyond its edges, where it is black: torchvision's RandomCrop, for images of about 32 pixels."""
    crop_padding: Annotated[int, AtLeast(0, "4 is usual for 32 pixels")] = 4
    """crop=shift: pixels by which a training crop may reach beyond the resized image."""
    crop_scale: Annotated[tuple[float, float], Above(0), AtMost(1, "smallest first, e.g. 0.08 1.0")] = (
        0.08,
        1.0,
    )
    """Smallest and largest share of the image's area that a training crop covers."""
    crop_ratio: Annotated[tuple[float, float], Above(0, "narrowest first, e.g. 0.75 1.3333")] = (3 / 4, 4 / 3)
    """Narrowest and widest training crop, width over height."""
    flip: Annotated[float, AtLeast(0), _CHANCE] = 0.5
    """Probability of a left-right flip in training."""
    policy: Literal["none", "autoaugment", "randaugment", "trivialaugment", "augmix"] = "none"
    """Operations on colours and shape after crop and flip."""
    policy_magnitude: Annotated[int, AtLeast(0), AtMost(30, "9 is usual")] = 9
    """randaugment: strength of its operations, 0 to 30."""
    augmix_severity: Annotated[int, AtLeast(1), AtMost(10, "3 is usual")] = 3
    """augmix: greatest strength of its operations, 1 to 10."""
    random_erase: Annotated[float, AtLeast(0), _CHANCE] = 0.0
    """Probability that a random box of a training image is set to the mean colour."""
    mixup: Annotated[float, _ALPHA] = 0.0
    """Alpha of the Beta(alpha, alpha) that mixes each training image with another; 0 is off."""
    mixup_per: Literal["batch", "sample"] = "batch"
    """batch: one share for all images of a step on a device, as in PyTorch; sample: one for each, as in NVIDIA's
    TensorFlow recipes."""
    mixup_partner: Literal["previous", "reversed", "random"] = "previous"
    """mixup and cutmix: which other image of the batch. previous: the one before it; reversed: the batch read
    backwards; random: a permutation. The batch is what a device computes at once: with accumulation, a part."""
    cutmix: Annotated[float, _ALPHA] = 0.0
    """Alpha of the Beta(alpha, alpha) for a box pasted from another image; 0 is off. With mixup, a coin per batch
    chooses between the two."""
    size: Annotated[int, _SIDE] = 224
    """Side in pixels of the square the network sees in training."""
    eval_resize: Annotated[int, _SIDE] = 256
    """Length in pixels the shorter side (stretch: both) is resized to in evaluation."""
    eval_geometry: Literal["short_side", "stretch"] = "short_side"
    """short_side: the image keeps its aspect ratio; stretch: it is made square first, as hardware decoders do."""
    eval_size: Annotated[int, _SIDE] = 224
    """Side in pixels of the square cut from the middle in evaluation."""
    interpolation: Literal["bilinear", "bicubic", "legacy"] = "bilinear"
    """Filter of every resize: bilinear and bicubic are antialiased; legacy is TensorFlow 1's bilinear, neither
    antialiased nor centred, rounded to whole grey levels (the originals kept the fraction: up to half a level)."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Mean of red, green and blue, of values in 0..1; the default is ImageNet's."""
    std: Annotated[tuple[float, float, float], _STD] = (0.229, 0.224, 0.225)
    """Standard deviation of red, green and blue, of values in 0..1; the default is ImageNet's."""
    image_type: Literal["uint8", "bf16", "fp32"] = "uint8"
    """Type in which images are copied to the device. uint8: normalised there; bf16, fp32: normalised by the loader, at
    two and four times the traffic; bf16 is also rounded."""

    def check(self) -> None:
        super().check()
        (low, high), (narrowest, widest) = self.crop_scale, self.crop_ratio
        if low > high:
            raise UsageError(f"data.crop_scale={self.crop_scale} must be 0 < smallest <= largest <= 1, e.g. 0.08 1.0")
        if self.crop == "tf" and high * COVERED_ONE_IN < 1:
            raise UsageError(
                f"data.crop=tf keeps no crop below a tenth of the image, so data.crop_scale={self.crop_scale} never "
                f"gives one; raise its second number, e.g. 0.05 1.0"
            )
        if narrowest > widest:
            raise UsageError(f"data.crop_ratio={self.crop_ratio} must be 0 < narrowest <= widest, e.g. 0.75 1.3333")
        if self.mixup_per == "sample" and self.cutmix:
            raise UsageError(
                f"data.mixup_per=sample cannot be combined with data.cutmix={self.cutmix}, whose box is the batch's; "
                f"use --data.mixup-per batch or --data.cutmix 0"
            )


@dataclass(frozen=True)
class DetectionFields(Part):
    """Settings: how images with boxes become the squares that a detector trains and is evaluated on."""

    part = "data"

    augment: Literal["on", "off"] = "on"
    """off: no randomness in training; images are seen as in evaluation."""
    size: Annotated[int, AtLeast(1, "it is a length in pixels, e.g. 300")] = 300
    """Side in pixels of the square the network sees."""
    crop: Literal["tf", "mlperf", "off"] = "tf"
    """Random crops that keep a drawn overlap with every box. tf: use the last of `crop_tries` that fits; 0 means more
    than none. mlperf: use the first that fits; 0 means any. off: the whole image."""
    crop_tries: Annotated[int, AtLeast(1, "50 is usual")] = 50
    """Crops tried for one drawn overlap before another is drawn; 50 in the TensorFlow original, 1 in MLPerf's."""
    flip: Annotated[float, AtLeast(0), _CHANCE] = 0.5
    """Probability of a left-right flip in training."""
    jitter: Literal["tf", "mlperf", "off"] = "tf"
    """Colours. tf: brightness is added, contrast is about each channel's mean, fixed order, nothing clipped; mlperf:
    brightness is multiplied, contrast is about the mean grey, random order, 8-bit values after every operation."""
    brightness: Annotated[float, AtLeast(0), AtMost(1)] = 0.125
    """jitter: largest number added (tf, to values in 0..1), or largest distance of the factor from 1 (mlperf)."""
    contrast: Annotated[float, AtLeast(0), AtMost(1)] = 0.5
    """jitter: largest distance of the factor from 1."""
    saturation: Annotated[float, AtLeast(0), AtMost(1)] = 0.5
    """jitter: largest distance of the factor from 1."""
    hue: Annotated[float, AtLeast(0), AtMost(0.5)] = 0.05
    """jitter: largest rotation of colours, as a share of the colour circle."""
    resize: Literal["tf", "antialias"] = "tf"
    """tf: bilinear without antialiasing, with aligned corners in training and TensorFlow 1's grid in evaluation;
    antialias: torch's antialiased bilinear on whole pixels, as MLPerf's PyTorch reference. Both round to whole grey
    levels."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Mean of red, green and blue, of values in 0..1; the default is ImageNet's."""
    std: Annotated[tuple[float, float, float], _STD] = (0.229, 0.224, 0.225)
    """Standard deviation of red, green and blue, of values in 0..1; the default is ImageNet's."""


@dataclass(frozen=True)
class SegmentationFields(Part):
    """Settings: what is done to a crop of a volume in training."""

    part = "data"

    augment: Literal["on", "off"] = "on"
    """off: only the position of the crop is random."""
    augment_on: Literal["auto", "host", "device"] = not_compared("auto")
    """Place of the augmentation: in the loader's processes, or on the device within the step; auto: on the device,
    unless it is the CPU. Voxels agree to 1e-5 of the largest."""
    oversampling: Annotated[float, AtLeast(0), _CHANCE] = 0.33
    """Probability that a crop is centred on a foreground voxel instead of any voxel."""
    zoom: Annotated[float, AtLeast(0), _CHANCE] = 0.15
    """Probability of a zoom: the middle of the crop, resized to its size (image cubic, label nearest)."""
    zoom_range: Annotated[tuple[float, float], AtLeast(0), AtMost(1)] = (0.7, 1.0)
    """Smallest and largest share of each side that a zoom keeps."""
    zoom_depth: bool = True
    """2D networks: a zoom also resizes along the depth. The original does; NVIDIA's later release does not."""
    flip: Annotated[float, AtLeast(0), _CHANCE] = 0.33
    """Probability of a flip, for width and height each, and for depth if the network is 3D."""
    rotation: Annotated[float, AtLeast(0), _CHANCE] = 0.0
    """Probability of a rotation in the plane of height and width (image linear, label nearest, 0 outside). nnU-Net:
    0.2; the original has none."""
    rotation_range: Annotated[tuple[float, float], AtLeast(-180), AtMost(180)] = (-180.0, 180.0)
    """Smallest and largest angle of a rotation in degrees, those of nnU-Net in 2D."""
    noise: Annotated[float, AtLeast(0), _CHANCE] = 0.15
    """Probability of Gaussian noise."""
    noise_std: Annotated[tuple[float, float], AtLeast(0), AtMost(100)] = (0.0, 0.33)
    """Smallest and largest standard deviation of the noise."""
    blur: Annotated[float, AtLeast(0), _CHANCE] = 0.15
    """Probability of a Gaussian blur along depth, height and width."""
    blur_sigma: Annotated[tuple[float, float], AtLeast(0), AtMost(20)] = (0.5, 1.5)
    """Smallest and largest sigma of the blur in voxels; its kernel ends at 3 sigma, rounded up."""
    brightness: Annotated[float, AtLeast(0), _CHANCE] = 0.15
    """Probability of a change of brightness: values times a factor."""
    brightness_range: Annotated[tuple[float, float], AtLeast(0), AtMost(100)] = (0.7, 1.3)
    """Smallest and largest factor of brightness."""
    contrast: Annotated[float, AtLeast(0), _CHANCE] = 0.15
    """Probability of a change of contrast: values times a factor, clipped to the range that the crop had."""
    contrast_range: Annotated[tuple[float, float], AtLeast(0), AtMost(100)] = (0.65, 1.5)
    """Smallest and largest factor of contrast."""
    gamma: Annotated[float, AtLeast(0), _CHANCE] = 0.0
    """Probability of a gamma change: values of each channel, scaled to 0..1, to a power; mean and deviation stay.
    nnU-Net: 0.3; the original has none."""
    gamma_inverted: Annotated[float, AtLeast(0), _CHANCE] = 0.0
    """Probability of the same on the negative image, before it. nnU-Net: 0.1."""
    gamma_range: Annotated[tuple[float, float], AtLeast(0), AtMost(10)] = (0.7, 1.5)
    """Smallest and largest power; below and above 1 equally often."""

    def check(self) -> None:
        super().check()
        for name in _RANGES:
            low, high = getattr(self, name)
            if low > high:
                raise UsageError(f"data.{name}={low} {high} must be two numbers, the smaller one first")


@dataclass(frozen=True)
class MaskFields(Part):
    """Settings: how images with masks become the crops that a network trains on."""

    part = "data"

    augment: Literal["on", "off"] = "on"
    """off: no randomness in training; crops are the middle of each image, at its own scale."""
    size: Annotated[int, AtLeast(1, "it is a length in pixels, e.g. 384")] = 384
    """Side in pixels of the crops that the network trains on, and of its windows on large images."""
    scale: Annotated[tuple[float, float], AtLeast(0.1), AtMost(10, "smallest first, e.g. 0.5 2.0")] = (0.5, 2.0)
    """Smallest and largest factor by which an image is enlarged before a training crop is cut; half of them enlarge."""
    oversampling: Annotated[float, AtLeast(0), _CHANCE] = 0.33
    """Probability that a crop is centred on a pixel of a class drawn from those in the image, instead of lying
    anywhere: small objects in large images would hardly be seen."""
    flip: Annotated[float, AtLeast(0), _CHANCE] = 0.5
    """Probability of a left-right flip in training."""
    flip_rows: Annotated[float, AtLeast(0), _CHANCE] = 0.0
    """Probability of an up-down flip, for images without an up, as from a microscope or from the air."""
    brightness: Annotated[float, AtLeast(0), AtMost(1)] = 0.2
    """Largest distance from 1 of the factor that changes the brightness of a crop."""
    contrast: Annotated[float, AtLeast(0), AtMost(1)] = 0.2
    """Largest distance from 1 of the factor by which values move away from their mean."""
    saturation: Annotated[float, AtLeast(0), AtMost(1)] = 0.2
    """Largest distance from 1 of the factor by which colours move away from grey; images of 3 channels only."""
    mean: tuple[float, ...] = ()
    """Mean of each channel, of values in 0..1. Empty: ImageNet's for 3 channels of 8 bits, else that of the data."""
    std: Annotated[tuple[float, ...], Above(0, "one positive number for each channel")] = ()
    """Standard deviation of each channel, of values in 0..1. Empty: as for the mean."""

    def check(self) -> None:
        super().check()
        if self.scale[0] > self.scale[1]:
            raise UsageError(f"data.scale={self.scale} must be two numbers, the smaller one first, e.g. 0.5 2.0")
        if len(self.mean) != len(self.std):
            raise UsageError(
                f"data.mean has {len(self.mean)} numbers and data.std {len(self.std)}; give one per channel in both"
            )
