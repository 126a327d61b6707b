"""Run the lines of a file on the GPUs of one machine, each GPU one at a time, and start none that would end too late.

    python lab/jobs.py FILE SECONDS LOGS

A line is `GPUS|NAME|NEEDS|SECONDS|COMMAND`: GPUS is 0 or 0,1; NEEDS is a file that has to be there first, or empty;
SECONDS are foreseen. Lines of one GPU run in the order of the file. LOGS gets NAME.log of each, and jobs.log.
"""

import os
import pathlib
import subprocess
import sys
import threading
import time

begun, limit, logs = time.monotonic(), float(sys.argv[2]), pathlib.Path(sys.argv[3])
logs.mkdir(parents=True, exist_ok=True)
changed, busy = threading.Condition(), set()


def say(*words):
    with (logs / "jobs.log").open("a") as file:
        print(f"{time.monotonic() - begun:7.1f}", *words, file=file)


def run(gpus, name, command):
    say("start", name, *gpus)
    with (logs / f"{name}.log").open("w") as log:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        code = subprocess.call(["bash", "-c", command], env=environment, stdout=log, stderr=subprocess.STDOUT)
    say("end", name, code)
    with changed:
        busy.difference_update(gpus)
        changed.notify()


def main():
    lines = pathlib.Path(sys.argv[1]).read_text().splitlines()
    waiting = [line.split("|", 4) for line in lines if line and not line.startswith("#")]
    threads = []
    with changed:
        while waiting:
            taken = set(busy)
            for job in list(waiting):
                gpus, name, needs, seconds, command = job[0].split(","), *job[1:]
                if time.monotonic() - begun + float(seconds) > limit:
                    say("too late", name)
                    waiting.remove(job)
                elif needs and not pathlib.Path(needs).exists():
                    continue
                elif taken.isdisjoint(gpus):
                    busy.update(gpus)
                    threads.append(threading.Thread(target=run, args=(gpus, name, command)))
                    threads[-1].start()
                    waiting.remove(job)
                taken.update(gpus)
            changed.wait(2)
    for thread in threads:
        thread.join()
    say("all done")


if __name__ == "__main__":
    main()
