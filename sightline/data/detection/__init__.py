"""Images with boxes: config.py says where they are and how they are prepared, dataset.py loads them."""

from sightline.data.detection.config import DetectionData as DetectionData
