import signal
import threading

import pytest

from penstock.recipes.interrupt import ctrl_c_at_checks


@pytest.fixture(autouse=True)
def _python_handles_ctrl_c():
    """Set the default handler: a background process of a shell ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_takes_effect_at_the_next_check_only():
    passed = []
    with pytest.raises(KeyboardInterrupt), ctrl_c_at_checks() as check:
        check()
        signal.raise_signal(signal.SIGINT)
        passed.append("the signal")
        check()
        passed.append("the check")
    assert passed == ["the signal"]


def test_a_second_ctrl_c_ends_the_process_at_once():
    with ctrl_c_at_checks():
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL


def test_python_handles_ctrl_c_again_afterwards():
    with ctrl_c_at_checks():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_ctrl_c_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with ctrl_c_at_checks() as check:
        signal.raise_signal(signal.SIGINT)
        check()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_leave_ctrl_c_alone():
    def enter():
        with ctrl_c_at_checks() as check:
            check()
            handlers.append(signal.getsignal(signal.SIGINT))

    handlers = []
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(60)
    assert handlers == [signal.default_int_handler]
