import fcntl
import os
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from registry.storage.free_space import FreeSpace
from server.launch.errors import ServeError
from server.launch.log_files import LogFiles
from server.launch.supervisor import (
    Backoff,
    ChildCannotStart,
    ChildSpec,
    Interrupted,
    Supervisor,
    SupervisorConfig,
    lock_data_dir,
)
from tests.registry.fake_disk import FakeDisk

FAST = SupervisorConfig(first_delay_s=0.01, poll_s=0.01)
SLEEP = "import time; time.sleep(600)"
IGNORE_SIGTERM = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""
NOTE_SIGTERM = """
import pathlib, signal, sys, time
def note(*_):
    with open(sys.argv[1], "a") as file:
        file.write(sys.argv[2])
    sys.exit()
signal.signal(signal.SIGTERM, note)
pathlib.Path(sys.argv[1] + sys.argv[2]).touch()
time.sleep(600)
"""


def make_child(name="child", code=SLEEP, *arguments, **options):
    command = (sys.executable, "-c", code, *map(str, arguments))
    options = {"stop_timeout_s": 20.0, "leave_timeout_s": 20.0, **options}
    return ChildSpec(name, command, dict(os.environ), **options)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A dead child of another process is a zombie until that process waits for it.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.01)


def run_until(supervisor, condition, timeout_s=120.0):
    deadline = time.monotonic() + timeout_s
    supervisor.run(until=lambda: condition() or time.monotonic() > deadline)
    assert condition(), "the condition never came true"


def test_a_killed_child_comes_back_and_its_neighbour_stays():
    with Supervisor([make_child("a"), make_child("b")], FAST) as supervisor:
        first = supervisor.pids
        os.kill(first["a"], signal.SIGKILL)
        run_until(supervisor, lambda: supervisor.pids.get("a") not in (None, first["a"]))
        assert supervisor.pids["b"] == first["b"]


def test_a_child_that_says_it_cannot_start_ends_the_run_instead_of_starting_for_ever():
    with (
        Supervisor([make_child("engine", f"raise SystemExit({os.EX_CONFIG})")], FAST) as supervisor,
        pytest.raises(ChildCannotStart, match="engine"),
    ):
        supervisor.run()


def test_a_child_that_failed_to_start_is_tried_again_but_not_for_ever(tmp_path):
    starts = tmp_path / "starts"
    code = f"import sys; open(sys.argv[1], 'a').write('x'); sys.exit({os.EX_DATAERR})"
    with (
        Supervisor([make_child("engine", code, starts)], FAST) as supervisor,
        pytest.raises(ChildCannotStart, match="engine"),
    ):
        supervisor.run()
    assert starts.read_text() == "xxx"


def test_a_child_of_which_the_plan_decides_ends_no_other_if_it_cannot_start(tmp_path):
    reasons = []
    code = f"raise SystemExit({os.EX_CONFIG})"
    refusing = make_child("engine", code, on_refusal=reasons.append)

    def plan():
        return [make_child("other"), *([] if reasons else [refusing])]

    with Supervisor(plan, FAST) as supervisor:
        run_until(supervisor, lambda: reasons and "engine" not in supervisor.pids)
        assert "other" in supervisor.pids
    assert reasons == [reasons[0]]
    assert "cannot start with these settings" in reasons[0]


@pytest.mark.parametrize(
    ("number", "asks"), [(signal.SIGHUP, "reload"), (signal.SIGUSR2, "replace")]
)
def test_a_signal_has_settings_read_again_or_children_replaced_and_ends_nothing(number, asks):
    seen, before = [], signal.getsignal(number)
    with Supervisor([make_child()], FAST, **{asks: lambda: seen.append("asked")}) as supervisor:
        # To this thread, whose handler runs at once; others may get a signal to the process later.
        signal.raise_signal(number)
        signal.raise_signal(number)
        run_until(supervisor, lambda: seen)
        assert not supervisor.is_stopping
        assert seen == ["asked"], "two that come together are one"
        signal.raise_signal(number)
        run_until(supervisor, lambda: len(seen) == 2)
    assert signal.getsignal(number) == before


IN_A_TERMINAL = """
import sys
from tests.server.launch.test_supervisor import FAST, make_child, Supervisor
with Supervisor([make_child()], FAST, reload=lambda: None) as supervisor:
    open(sys.argv[1], "w").close()
    supervisor.run()
"""


def test_a_terminal_that_closes_ends_what_runs_in_it(tmp_path):
    terminal, inside = os.openpty()
    ready = tmp_path / "ready"
    process = subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL, str(ready)],
        stdin=inside,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(inside)
    wait_until(ready.exists)
    os.close(terminal)
    assert process.wait(timeout=20) == 0


WHY = "import sys; print('the disk is gone', file=sys.stderr); sys.exit(int(sys.argv[1]))"


@pytest.mark.parametrize("code", [os.EX_CONFIG, 1])
def test_what_a_child_said_before_a_failed_start_is_said_at_the_end(tmp_path, code):
    children = [make_child("engine", WHY, code), make_child("talker", "print('noise')")]
    with (
        Supervisor(children, FAST, logs=LogFiles(tmp_path)) as supervisor,
        pytest.raises(ChildCannotStart, match=r"(?s)engine.*engine\.log.*the disk is gone$"),
    ):
        supervisor.run(may_restart=False)


def test_the_output_of_all_starts_of_a_child_is_in_its_file(tmp_path):
    log = tmp_path / "child.log"
    with Supervisor([make_child("child", WHY, 1)], FAST, logs=LogFiles(tmp_path)) as supervisor:
        run_until(supervisor, lambda: log.read_text().count("the disk is gone\n") >= 3)


TALK = """
import sys, time
for number in range(10_000, 30_000):
    print(number, flush=True)
open(sys.argv[1], "w")
time.sleep(600)
"""


def test_a_child_that_talks_without_end_fills_no_disk_and_its_last_words_stay(tmp_path):
    done, log = tmp_path / "done", tmp_path / "child.log"
    logs = LogFiles(tmp_path, max_bytes=4000)
    with Supervisor([make_child("child", TALK, done)], FAST, logs=logs) as supervisor:
        run_until(supervisor, done.exists)
        logs.tend()
        lines = log.read_text().splitlines()
        assert log.stat().st_size <= 4000
        assert ({len(line) for line in lines}, lines[-1]) == ({5}, "29999")


def test_a_log_is_cut_further_while_the_disk_has_no_room(tmp_path):
    disk = FakeDisk(free_bytes=1000)
    logs = LogFiles(tmp_path, FreeSpace(1000, disk), max_bytes=1 << 20)
    log = tmp_path / "child.log"
    with logs.open("child") as file:
        file.write(b"a line\n" * 10_000)
    disk.free_bytes = 1001
    logs.tend()
    assert log.stat().st_size == 70_000
    disk.free_bytes = 1000
    logs.tend()
    assert log.read_bytes() == b"a line\n" * (16_384 // 7)


def test_a_log_folder_that_was_deleted_is_made_again(tmp_path):
    logs = LogFiles(tmp_path / "logs")
    with Supervisor([make_child("child")], FAST, logs=logs) as supervisor:
        shutil.rmtree(tmp_path / "logs")
        first = supervisor.pids["child"]
        os.kill(first, signal.SIGKILL)
        run_until(supervisor, lambda: supervisor.pids.get("child") not in (None, first))
        assert (tmp_path / "logs" / "child.log").exists()


def test_the_pause_doubles_up_to_its_limit():
    backoff = Backoff(SupervisorConfig(first_delay_s=0.1, max_delay_s=10.0))
    delays = [backoff.next_delay_s(lived_s=0.0) for _ in range(9)]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]


def test_a_child_that_lived_long_enough_is_forgiven():
    backoff = Backoff(SupervisorConfig(first_delay_s=0.1, healthy_s=30.0))
    for _ in range(5):
        backoff.next_delay_s(lived_s=29.9)
    assert backoff.next_delay_s(lived_s=30.0) == 0.1
    assert backoff.next_delay_s(lived_s=0.0) == 0.2


def test_children_stop_by_stages_the_highest_first(tmp_path):
    log = tmp_path / "log"
    specs = [make_child(n, NOTE_SIGTERM, log, n, stage=i) for i, n in enumerate("abc")]
    specs += [make_child("B", NOTE_SIGTERM, log, "B", stage=1)]
    with Supervisor(specs, FAST) as supervisor:
        run_until(supervisor, lambda: all(Path(f"{log}{name}").exists() for name in "abcB"))
    assert log.read_text() in ("cbBa", "cBba")


def test_those_of_one_stage_stop_together(tmp_path):
    """Each child ends once the other has its signal, so stopping them in turn would never end."""
    code = """
import pathlib, signal, sys, time
mine, others = map(pathlib.Path, sys.argv[1:])
def go(*_):
    mine.touch()
    while not others.exists():
        time.sleep(0.01)
    (mine.parent / f"{mine.name} went").touch()
    sys.exit()
signal.signal(signal.SIGTERM, go)
(mine.parent / f"{mine.name} is there").touch()
time.sleep(600)
"""
    a, b = tmp_path / "a", tmp_path / "b"
    specs = [make_child("a", code, a, b), make_child("b", code, b, a)]
    with Supervisor(specs, FAST) as supervisor:
        run_until(supervisor, lambda: len(list(tmp_path.glob("* is there"))) == 2)
    assert len(list(tmp_path.glob("* went"))) == 2


# ---- children that stand still ----

BEATING = """
import pathlib, sys, time
from lora.beat import Beat
beat = Beat.inherited(0.3)
beat.beat()
pathlib.Path(sys.argv[1]).touch()
while True:
    beat.beat()
    time.sleep(0.01)
"""
BUSY = """
import pathlib, sys, time
from lora.beat import Beat
beat = Beat.inherited(0.3)
with beat.busy("loading", 600.0):
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(600)
"""
WITH_GRANDCHILD = f"""
import pathlib, subprocess, sys, time
from lora.beat import Beat
grandchild = subprocess.Popen([sys.executable, "-c", {SLEEP!r}])
pathlib.Path(sys.argv[1]).write_text(str(grandchild.pid))
Beat.inherited(0.3).beat()
time.sleep(600)
"""


def make_watched(name, code, *arguments, first_beat_s=20.0):
    return make_child(name, code, *arguments, first_beat_s=first_beat_s)


def test_a_child_that_is_stopped_is_killed_and_started_again_and_others_are_left_alone(
    tmp_path, caplog
):
    ready, also_ready = tmp_path / "ready", tmp_path / "also ready"
    children = [
        make_watched("engine", BEATING, ready),
        make_watched("fetcher", BEATING, also_ready),
        make_watched("loading", BUSY, tmp_path / "loading"),
        make_child("gateway"),
    ]
    with Supervisor(children, FAST) as supervisor:
        run_until(supervisor, lambda: all((tmp_path / n).exists() for n in
                  ("ready", "also ready", "loading")))  # fmt: skip
        first = supervisor.pids
        ready.unlink()
        os.kill(first["engine"], signal.SIGSTOP)
        run_until(supervisor, ready.exists)
        assert not is_alive(first["engine"])
        assert {**supervisor.pids, "engine": 0} == {**first, "engine": 0}
    assert "engine has been silent for" in caplog.text
    assert "engine ended (SIGKILL); again in" in caplog.text


def test_what_a_silent_child_has_started_is_killed_with_it(tmp_path):
    note = tmp_path / "pid"
    with Supervisor([make_watched("engine", WITH_GRANDCHILD, note)], FAST) as supervisor:
        run_until(supervisor, lambda: note.exists() and note.read_text())
        first, grandchild = supervisor.pids["engine"], int(note.read_text())
        run_until(supervisor, lambda: supervisor.pids.get("engine") not in (None, first))
        wait_until(lambda: not is_alive(grandchild))


def test_a_child_that_never_beats_is_started_again_as_one_that_failed_to_start(tmp_path):
    children = [make_watched("engine", SLEEP, first_beat_s=0.2)]
    with (
        Supervisor(children, FAST, logs=LogFiles(tmp_path)) as supervisor,
        pytest.raises(ChildCannotStart, match="engine ended before it was ready .SIGKILL."),
    ):
        supervisor.run(may_restart=False)


# ---- a plan that changes ----


def test_who_is_planned_is_started_and_who_is_no_more_is_asked_to_go_and_stays_away(tmp_path):
    log = tmp_path / "log"
    plan = [make_child("a")]
    with Supervisor(lambda: plan, FAST) as supervisor:
        assert set(supervisor.pids) == {"a"}
        plan.append(make_child("b", NOTE_SIGTERM, log, "b"))
        run_until(supervisor, Path(f"{log}b").exists)
        first = supervisor.pids
        del plan[1]
        run_until(supervisor, lambda: "b" not in supervisor.pids)
        assert log.read_text() == "b", "b got one signal"
        assert not is_alive(first["b"])
        for _ in range(20):
            supervisor.tend()
        assert supervisor.pids == {"a": first["a"]}


def test_who_does_not_go_is_killed_when_its_time_is_up_and_nobody_waits_for_it(tmp_path):
    ready = tmp_path / "ready"
    plan = [make_child("stubborn", IGNORE_SIGTERM, ready, leave_timeout_s=0.3), make_child("other")]
    with Supervisor(lambda: plan, FAST) as supervisor:
        run_until(supervisor, ready.exists)
        pid = supervisor.pids["stubborn"]
        del plan[0]
        supervisor.tend()
        assert is_alive(pid), "its time is not up yet"
        os.kill(supervisor.pids["other"], signal.SIGKILL)
        run_until(supervisor, lambda: "stubborn" not in supervisor.pids)
        assert not is_alive(pid)
        run_until(supervisor, lambda: "other" in supervisor.pids)


def test_another_command_under_the_same_name_waits_until_the_first_has_gone(tmp_path):
    log = tmp_path / "log"
    plan = [make_child("a", NOTE_SIGTERM, log, "1")]
    with Supervisor(lambda: plan, FAST) as supervisor:
        run_until(supervisor, Path(f"{log}1").exists)
        first = supervisor.pids["a"]
        plan[0] = make_child("a", NOTE_SIGTERM, log, "2")
        run_until(supervisor, Path(f"{log}2").exists)
        assert log.read_text() == "1"
        assert not is_alive(first)


def test_who_is_planned_again_while_it_goes_starts_again(tmp_path):
    log = tmp_path / "log"
    plan = [make_child("a", NOTE_SIGTERM, log, "1")]
    with Supervisor(lambda: plan, FAST) as supervisor:
        run_until(supervisor, Path(f"{log}1").exists)
        first = supervisor.pids["a"]
        (spec,) = plan
        plan.clear()
        supervisor.tend()
        plan.append(spec)
        run_until(supervisor, lambda: supervisor.pids.get("a") not in (None, first))
        assert not is_alive(first)


def test_another_command_does_not_wait_for_what_the_first_did_wrong(tmp_path):
    slow = SupervisorConfig(first_delay_s=3600.0, max_delay_s=3600.0, poll_s=0.01)
    plan = [make_child("a", "raise SystemExit(1)")]
    with Supervisor(lambda: plan, slow) as supervisor:
        run_until(supervisor, lambda: not supervisor.pids)
        plan[0] = make_child("a")
        supervisor.tend()
        assert supervisor.pids["a"]


def test_nothing_lingers_not_even_what_a_child_has_started(tmp_path):
    note = tmp_path / "pid"
    with Supervisor([make_child("parent", WITH_GRANDCHILD, note)], FAST) as supervisor:
        run_until(supervisor, lambda: note.exists() and note.read_text())
        pids = [*supervisor.pids.values(), int(note.read_text())]
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_a_child_that_ignores_sigterm_is_killed_when_its_time_is_up(tmp_path):
    ready = tmp_path / "ready"
    stubborn = make_child("stubborn", IGNORE_SIGTERM, ready, stop_timeout_s=0.1)
    with Supervisor([stubborn], FAST) as supervisor:
        run_until(supervisor, ready.exists)
        pid = supervisor.pids["stubborn"]
    assert not is_alive(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_and_is_handled_as_before_afterwards(number):
    before = signal.getsignal(number)
    with Supervisor([make_child()], FAST) as supervisor:
        pid = supervisor.pids["child"]
        os.kill(os.getpid(), number)
        supervisor.run()
        assert supervisor.is_stopping
    assert not is_alive(pid)
    assert signal.getsignal(number) == before


def test_a_second_signal_does_not_wait_for_the_drain(tmp_path):
    ready = tmp_path / "ready"
    draining = make_child("draining", IGNORE_SIGTERM, ready, stop_timeout_s=3600.0)
    with Supervisor([draining], FAST) as supervisor:
        run_until(supervisor, ready.exists)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        pid = supervisor.pids["draining"]
        supervisor.run()
    assert not is_alive(pid)


def test_work_that_polls_nothing_is_left_at_a_signal_and_the_children_stop():
    with Supervisor([make_child()], FAST) as supervisor:
        pid = supervisor.pids["child"]
        with pytest.raises(Interrupted), supervisor.interruptible():
            wait_until(lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Interrupted), supervisor.interruptible():
            pytest.fail("the signal came before the block")
        signal.raise_signal(signal.SIGTERM)  # outside of such work it interrupts nothing
        supervisor.run()
    assert not is_alive(pid)


def test_a_terminals_ctrl_c_reaches_children_only_through_the_supervisor():
    with Supervisor([make_child()], FAST) as supervisor:
        assert os.getsid(supervisor.pids["child"]) != os.getsid(0)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_children_die_with_a_supervisor_that_was_killed(tmp_path):
    script = f"""
import pathlib, sys
from server.launch.supervisor import ChildSpec, Supervisor
specs = [ChildSpec("child", (sys.executable, "-c", {SLEEP!r}), {{}})]
with Supervisor(specs) as supervisor:
    pathlib.Path(sys.argv[1]).write_text(str(supervisor.pids["child"]))
    supervisor.run()
"""
    note = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", script, str(note)]) as process:
        wait_until(lambda: note.exists() and note.read_text())
        process.kill()
    wait_until(lambda: not is_alive(int(note.read_text())))


def test_a_data_directory_has_one_supervisor(tmp_path):
    with (
        lock_data_dir(tmp_path),
        pytest.raises(ServeError, match=f"process {os.getpid()}"),
        lock_data_dir(tmp_path),
    ):
        pass
    with lock_data_dir(tmp_path):
        pass


def test_a_child_inherits_its_descriptors_and_the_supervisor_closes_them_at_its_end(tmp_path):
    ours, theirs = os.pipe()
    code = "import os, sys; os.write(int(sys.argv[1]), b'x'); " + SLEEP
    with Supervisor([make_child("writer", code, theirs, descriptors=(theirs,))], FAST):
        assert os.read(ours, 1) == b"x"
    assert os.read(ours, 1) == b"", "nobody has the other end any more"
    os.close(ours)
