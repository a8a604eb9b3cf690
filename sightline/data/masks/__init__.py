"""Images with masks: config.py says where they are and how they are prepared, dataset.py loads them."""

from sightline.data.masks.config import MaskData as MaskData
