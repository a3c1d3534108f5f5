import gc
import threading

from gateway.prompts.uncollected import uncollected


def test_the_collector_waits_and_goes_on() -> None:
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_goes_on_after_an_error() -> None:
    try:
        with uncollected():
            raise ValueError
    except ValueError:
        pass
    assert gc.isenabled()


def test_threads_take_turns_so_that_it_runs_between_them() -> None:
    found: list[bool] = []

    def work() -> None:
        with uncollected():
            found.append(gc.isenabled())

    threads = [threading.Thread(target=work) for _ in range(4)]
    with uncollected():
        for thread in threads:
            thread.start()
        assert found == []
    for thread in threads:
        thread.join()

    assert found == [False] * 4
    assert gc.isenabled()
