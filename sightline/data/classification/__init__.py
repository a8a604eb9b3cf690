"""Images with labels: config.py says where they are and how they are prepared, dataset.py loads them."""

from sightline.data.classification.config import ClassificationData as ClassificationData
