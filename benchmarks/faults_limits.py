"""Faults of memory, files and clocks: what a process may have, and what time it thinks it is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from faults_rows import Skip, fault
from faults_run import COMPILED, End, Scene

# What libc says of the wall clock jumps by so many seconds as a file of that name holds.
_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long jump(void) {
    long seconds = 0;
    FILE *file = fopen(getenv("JUMP_FILE"), "r");
    if (file) { if (fscanf(file, "%ld", &seconds) != 1) seconds = 0; fclose(file); }
    return seconds;
}
int clock_gettime(clockid_t id, struct timespec *ts) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int rc = real(id, ts);
    if (id == CLOCK_REALTIME) ts->tv_sec += jump();
    return rc;
}
int gettimeofday(struct timeval *tv, void *tz) {
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    tv->tv_sec = ts.tv_sec; tv->tv_usec = ts.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *out) {
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    if (out) *out = ts.tv_sec;
    return ts.tv_sec;
}
"""


def _jumping_clock(scene: Scene) -> tuple[dict[str, str], Path]:
    """The environment of processes whose wall clock jumps, and the file that says by how much."""
    source, library = scene.folder / "clock.c", scene.folder / "clock.so"
    source.write_text(_CLOCK)
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Skip(f"no C compiler: {error}") from error
    jump = scene.folder / "jump"
    return {"LD_PRELOAD": str(library), "JUMP_FILE": str(jump)}, jump


def _clock_jumps(scene: Scene, seconds: int) -> End:
    env, jump = _jumping_clock(scene)
    run = scene.train("--checkpoint-every", "2", "--stop-after", "10", env=env)
    run.says("step 3/")
    jump.write_text(str(seconds))
    end = run.end()
    times = [line.split()[6] for line in end.text.split("\n") if line.startswith("step ")]
    odd = [t for t in times if not 0 < float(t) < 60]
    return end.expect(not odd, f"seconds per step of {odd}")


@fault("one day on, after step 3", "goes on, exit 0", codes={0}, loses=0, resumes=True)
def clock_jumps_forward(scene: Scene) -> End:
    return _clock_jumps(scene, 86_400)


@fault("one day back, after step 3", "goes on, exit 0", codes={0}, loses=0, resumes=True)
def clock_jumps_back(scene: Scene) -> End:
    return _clock_jumps(scene, -86_400)


def _with_memory(scene: Scene, kilobytes: int, *, options: list[str]) -> End:
    run = scene.train("--checkpoint-every", "2", options=options, limits=f"-v {kilobytes}")
    return run.end(120)


@fault("ulimit -v 1.5 GB", "ends, nonzero", codes={1, 2, 134, 137, 139}, bound_s=120)
def out_of_memory_at_the_start(scene: Scene) -> End:
    return _with_memory(scene, 1_500_000, options=COMPILED)


# A command, and then the most address space that it has had.
_TELLS_PEAK = """
import atexit
from simplefsdp.cli import main
atexit.register(lambda: print(open("/proc/self/status").read(), flush=True))
main()
"""


@fault(
    "ulimit -v: 200 MB more than a small model takes",
    "one line, exit 1",
    codes={1},
    says="error: out of memory",
    bound_s=240,
)
def out_of_memory_while_planning(scene: Scene) -> End:
    small = ["inspect", "--model", "debug", "--layers", "1", "--ranks", "2"]
    told = scene.start([sys.executable, "-c", _TELLS_PEAK, *small]).end(240)
    peak = re.search(r"VmPeak:\s+(\d+) kB", told.text)
    assert peak, told.text
    large = ["inspect", "--model", "405b", "--ranks", "512"]
    limited = f'ulimit -v {int(peak[1]) + 200_000} && exec "$@"'
    command = [sys.executable, "-m", "simplefsdp", *large]
    return scene.start(["bash", "-c", limited, "bash", *command]).end(240)


@fault("ulimit -n 24: too few open files", "ends, nonzero", codes={1, 2, 134, 137, 139})
def out_of_open_files(scene: Scene) -> End:
    return scene.train(limits="-n 24").end()


@fault("no folder for temporary files", "ends or goes on", codes={0, 1, 2})
def no_temporary_folder(scene: Scene) -> End:
    return scene.train("--stop-after", "3", env={"TMPDIR": "/nonexistent"}).end()
