"""The command ``specbench``, also as ``python -m specbench``."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of the imports; ``run`` answers from there on

from specbench.cli import main

if __name__ == "__main__":
    main()
