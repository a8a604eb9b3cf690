"""`python -m sightline`."""

import sys

from sightline.cli import main

sys.exit(main())
