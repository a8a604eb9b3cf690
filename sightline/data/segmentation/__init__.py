"""Prepared volumes: config.py says where they are and how they are cut, dataset.py loads them."""

from sightline.data.segmentation.config import SegmentationData as SegmentationData
