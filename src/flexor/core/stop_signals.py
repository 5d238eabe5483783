"""The signals that make a run save and stop."""

import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


def handled() -> list[signal.Signals]:
    """Those that this process reacts to: not SIGHUP if whoever started it (nohup) made it ignore that one.

    A terminal that is closed sends SIGHUP.
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if not (ignored and number is signal.SIGHUP)]
