"""`python -m deltabars`."""

import sys

from deltabars.cli import main

sys.exit(main())
