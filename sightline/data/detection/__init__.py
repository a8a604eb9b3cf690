"""Images with boxes: config.py says where they are and how they are prepared, dataset.py loads them."""

from sightline.data.detection.dataset import DetectionData as DetectionData
