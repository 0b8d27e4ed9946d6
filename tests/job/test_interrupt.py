import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxpaged.job.interrupt import StopRequest


def wait_for(stop: StopRequest) -> None:
    deadline = time.monotonic() + 10
    while not stop() and time.monotonic() < deadline:
        time.sleep(0.005)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_asks_to_stop(number, code):
    handler = signal.getsignal(number)
    told = threading.Event()

    with StopRequest(told.set) as stop:
        assert not stop()
        os.kill(os.getpid(), number)
        wait_for(stop)
        assert stop()
        assert stop.exit_code == code
        assert told.wait(10)

    assert signal.getsignal(number) is handler


def test_a_second_signal_ends_the_process_at_once():
    script = (
        "import os, signal, sys, time\n"
        "from jaxpaged.job.interrupt import StopRequest\n"
        "with StopRequest(lambda: None) as stop:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    while not stop(): time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
    )

    started = time.monotonic()
    code = subprocess.run([sys.executable, "-c", script], check=False).returncode

    assert code == 130
    assert time.monotonic() - started < 30
