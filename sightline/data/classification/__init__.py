"""Images with labels: config.py says where they are and how they are prepared, dataset.py loads them."""

from sightline.data.classification.dataset import ClassificationData as ClassificationData
