"""`python -m safe_trainers.cli`."""

import sys

from .main import main


sys.exit(main())
