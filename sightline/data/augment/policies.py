"""Policies that change colours and shape: AutoAugment, RandAugment, TrivialAugment and AugMix.

`draw` chooses operations and magnitudes, `apply` applies them to an image with Pillow. Operations, magnitudes and
probabilities are those of torchvision.transforms.v2; pixels from outside the image are black.
"""

import math
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

Chain = tuple[tuple[str, float], ...]  # (operation, magnitude), one after the other
Policy = tuple[tuple[float, Chain], ...]  # (weight, chain): the image is the weighted sum of the chains' results

_COLOURS = ("Brightness", "Color", "Contrast", "Sharpness")
_SIGNED = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", *_COLOURS)
_WITHOUT_MAGNITUDE = ("Identity", "AutoContrast", "Equalize", "Invert")
OPERATIONS = ("Identity", *_SIGNED, "Posterize", "Solarize", "AutoContrast", "Equalize")  # RandAugment's, Trivial's
AUGMIX_OPERATIONS = OPERATIONS[1:]
RANDAUGMENT_LENGTH = 2
AUGMIX_CHAINS = 3
AUGMIX_LONGEST_CHAIN = 3


class _Strength(NamedTuple):
    """Magnitudes of a policy at its last bin; they grow from bin to bin in equal steps."""

    bins: int
    shear: float  # tangent of the angle
    shift_pixels: float
    shift_share: float  # of the side, in place of pixels
    rotate: float  # degrees
    colour: float  # distance of the factor from 1
    bits: tuple[int, int]  # Posterize: bits that are kept, at the first bin and at the last


_STRENGTHS = {
    "autoaugment": _Strength(10, 0.3, 0, 150 / 331, 30, 0.9, (8, 4)),
    "randaugment": _Strength(31, 0.3, 0, 150 / 331, 30, 0.9, (8, 4)),
    "trivialaugment": _Strength(31, 0.99, 32, 0, 135, 0.99, (8, 2)),
    "augmix": _Strength(10, 0.3, 0, 1 / 3, 30, 0.9, (4, 0)),
}

# AutoAugment's policy for ImageNet: pairs of (operation, probability, bin). Some pairs appear twice.
_AUTOAUGMENT = (
    (("Posterize", 0.4, 8), ("Rotate", 0.6, 9)),
    (("Solarize", 0.6, 5), ("AutoContrast", 0.6, 0)),
    (("Equalize", 0.8, 0), ("Equalize", 0.6, 0)),
    (("Posterize", 0.6, 7), ("Posterize", 0.6, 6)),
    (("Equalize", 0.4, 0), ("Solarize", 0.2, 4)),
    (("Equalize", 0.4, 0), ("Rotate", 0.8, 8)),
    (("Solarize", 0.6, 3), ("Equalize", 0.6, 0)),
    (("Posterize", 0.8, 5), ("Equalize", 1.0, 0)),
    (("Rotate", 0.2, 3), ("Solarize", 0.6, 8)),
    (("Equalize", 0.6, 0), ("Posterize", 0.4, 6)),
    (("Rotate", 0.8, 8), ("Color", 0.4, 0)),
    (("Rotate", 0.4, 9), ("Equalize", 0.6, 0)),
    (("Equalize", 0.0, 0), ("Equalize", 0.8, 0)),
    (("Invert", 0.6, 0), ("Equalize", 1.0, 0)),
    (("Color", 0.6, 4), ("Contrast", 1.0, 8)),
    (("Rotate", 0.8, 8), ("Color", 1.0, 2)),
    (("Color", 0.8, 8), ("Solarize", 0.8, 7)),
    (("Sharpness", 0.4, 7), ("Invert", 0.6, 0)),
    (("ShearX", 0.6, 5), ("Equalize", 1.0, 0)),
    (("Color", 0.4, 0), ("Equalize", 0.6, 0)),
    (("Equalize", 0.4, 0), ("Solarize", 0.2, 4)),
    (("Solarize", 0.6, 5), ("AutoContrast", 0.6, 0)),
    (("Invert", 0.6, 0), ("Equalize", 1.0, 0)),
    (("Color", 0.6, 4), ("Contrast", 1.0, 8)),
    (("Equalize", 0.8, 0), ("Equalize", 0.6, 0)),
)


# Drawing


def draw(name: str, random: np.random.Generator, side: int, magnitude: int, severity: int) -> Policy:
    """Draw a policy for a square image; `magnitude` is RandAugment's bin, `severity` AugMix's number of bins."""
    if name == "augmix":
        return _draw_augmix(random, side, severity)
    chain: list[tuple[str, float]] = []
    if name == "autoaugment":
        for operation, probability, at in _AUTOAUGMENT[int(random.integers(len(_AUTOAUGMENT)))]:
            if random.random() < probability:
                chain.append(_with_sign(random, operation, magnitude_at(name, operation, at, side)))
    elif name == "randaugment":
        for _ in range(RANDAUGMENT_LENGTH):
            operation = OPERATIONS[int(random.integers(len(OPERATIONS)))]
            chain.append(_with_sign(random, operation, magnitude_at(name, operation, magnitude, side)))
    elif name == "trivialaugment":
        chain.append(_draw_any_bin(name, random, OPERATIONS, _STRENGTHS[name].bins, side))
    else:
        return ()
    return ((1.0, tuple(chain)),)


def magnitude_at(name: str, operation: str, at: int, side: int) -> float:
    """Return the magnitude of an operation at bin `at`; 0 for those that have none.

    Computed in 64 bits. torchvision's float32 is slightly off, differently on each kind of CPU, so a shift of whole
    pixels, or a threshold at a whole grey level, can end up one below.
    """
    strength = _STRENGTHS[name]
    last = strength.bins - 1
    if operation in _WITHOUT_MAGNITUDE:
        return 0.0
    if operation == "Posterize":
        first_bits, last_bits = strength.bits
        return float(round(first_bits + (last_bits - first_bits) * at / last))
    if operation == "Solarize":
        return (last - at) / last
    shift = strength.shift_pixels + strength.shift_share * side
    at_last = {"ShearX": strength.shear, "ShearY": strength.shear, "TranslateX": shift, "TranslateY": shift}
    at_last |= {"Rotate": strength.rotate} | dict.fromkeys(_COLOURS, strength.colour)
    return at_last[operation] * at / last


def _with_sign(random: np.random.Generator, operation: str, magnitude: float) -> tuple[str, float]:
    return operation, -magnitude if operation in _SIGNED and random.random() < 0.5 else magnitude


def _draw_any_bin(
    name: str, random: np.random.Generator, operations: tuple[str, ...], bins: int, side: int
) -> tuple[str, float]:
    """Draw an operation and one of its first `bins` magnitudes, all equally likely."""
    operation = operations[int(random.integers(len(operations)))]
    if operation in _WITHOUT_MAGNITUDE:
        return operation, 0.0
    return _with_sign(random, operation, magnitude_at(name, operation, int(random.integers(bins)), side))


def _draw_augmix(random: np.random.Generator, side: int, severity: int) -> Policy:
    """Draw the weights of the untouched image and of three chains, from two flat Dirichlet distributions."""
    kept, changed = random.dirichlet((1.0, 1.0)).tolist()
    shares = random.dirichlet((1.0,) * AUGMIX_CHAINS).tolist()
    policy: list[tuple[float, Chain]] = [(kept, ())]
    for share in shares:
        length = int(random.integers(1, AUGMIX_LONGEST_CHAIN + 1))
        chain = [_draw_any_bin("augmix", random, AUGMIX_OPERATIONS, severity, side) for _ in range(length)]
        policy.append((share * changed, tuple(chain)))
    return tuple(policy)


# Pixels


def apply(policy: Policy, image: Image.Image, resampling: Image.Resampling) -> Image.Image:
    """Apply a drawn policy to an RGB image."""
    made = []
    for _, chain in policy:
        changed = image
        for operation, magnitude in chain:
            changed = _operate(operation, magnitude, changed, resampling)
        made.append(changed)
    if len(made) == 1:
        return made[0]
    total = np.zeros((image.height, image.width, 3), np.float32)
    for (weight, _), changed in zip(policy, made, strict=True):
        total += np.float32(weight) * np.asarray(changed, np.float32)
    return Image.fromarray(total.astype(np.uint8))  # truncated, not rounded, as in torchvision


def _operate(operation: str, magnitude: float, image: Image.Image, resampling: Image.Resampling) -> Image.Image:
    affine = Image.Transform.AFFINE
    width, height = image.size
    shift = int(magnitude)
    # Via degrees, as in torchvision: the last bit decides on which side of an edge a pixel falls.
    angle = math.radians(math.degrees(math.atan(magnitude)))
    match operation:
        case "Identity":
            return image
        case "ShearX":
            return image.transform(image.size, affine, (1, math.tan(angle), 0, 0, 1, 0), resampling)
        case "ShearY":
            slope = math.sin(angle) / math.cos(angle)
            return image.transform(image.size, affine, (1, 0, 0, slope, 1, 0), resampling)
        # By whole pixels, so a crop equals what a filter would give, sixty times as fast.
        case "TranslateX":
            return image.crop((-shift, 0, width - shift, height))
        case "TranslateY":
            return image.crop((0, -shift, width, height - shift))
        case "Rotate":
            return image.rotate(magnitude, resampling)
        case "Brightness":
            return ImageEnhance.Brightness(image).enhance(1 + magnitude)
        case "Color":
            return ImageEnhance.Color(image).enhance(1 + magnitude)
        case "Contrast":
            return ImageEnhance.Contrast(image).enhance(1 + magnitude)
        case "Sharpness":
            return ImageEnhance.Sharpness(image).enhance(1 + magnitude)
        case "Posterize":  # ImageOps.posterize refuses to keep 0 bits, AugMix's strongest: all black
            kept = 256 - 2 ** (8 - int(magnitude))
            return image.point([value & kept for value in range(256)] * 3)
        case "Solarize":
            threshold = 255 * magnitude
            return image.point([value if value < threshold else 255 - value for value in range(256)] * 3)
        case "AutoContrast":
            return ImageOps.autocontrast(image)
        case "Equalize":
            return ImageOps.equalize(image)
        case "Invert":
            return ImageOps.invert(image)
    raise AssertionError(f"no operation is called {operation}")
