"""What stands in for Python: see warm_python.py. Imports as little as it can, since it is started often."""

import json
import os
import signal
import socket
import sys

HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def main() -> int:
    address, python, *arguments = sys.argv[1:]
    told: list[int] = []
    pid = 0

    def hand_on(number: int, _: object) -> None:
        if pid:
            os.kill(pid, number)
        else:
            told.append(number)

    for number in HANDED_ON:
        signal.signal(number, hand_on)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        request = {
            "folder": os.getcwd(),  # noqa: PTH109
            "environment": dict(os.environ),
            "python": python,
            "arguments": arguments,
        }
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
        answers = server.makefile()
        pid = int(answers.readline() or 0)
        for number in told:
            os.kill(pid, number)
        code = int(answers.readline())
    if code < 0:  # a signal ended it, and so it does us
        if -code in HANDED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
