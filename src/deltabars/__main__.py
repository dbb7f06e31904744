"""`python -m deltabars`."""

import sys

try:
    from deltabars.cli import main
except KeyboardInterrupt:
    print("deltabars: interrupted", file=sys.stderr)
    sys.exit(1)

sys.exit(main())
