"""`python -m ray_ckpt`: the same as the console script `ray-ckpt`."""

import sys

from ray_ckpt.cli import main

sys.exit(main())
