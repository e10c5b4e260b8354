"""Every bad moment: kills, power cuts, calls that fail, damage. What tries them, and with what.

| case | what | test |
|---|---|---|
| 9 | disk full | `test_failing_calls.py::test_09…`, `slow/test_real_disks.py::test_09…` |
| 13 | a power cut after publish or ack, also in a new run directory | `slow/test_power_cuts.py` |
| 14 | zero-length, truncated, NUL-filled files | `test_damaged_spools.py::test_14…` |
| 15 | an fsync that fails once | `test_failing_calls.py`, `slow/test_failing_calls.py` |
| 16 | one bad name among good ones | `test_damaged_spools.py::test_16…`, `test_fuzz.py` |
| 17 | inotify's limits | `test_without_events.py::test_17…`, `test_watch.py` |
| 18 | overflow; a watched folder made again | `test_without_events.py::test_18…`, `test_watch.py` |
| 24 | a lock file deleted while held | `test_daemon.py::…::test_24…`, `test_fs.py::TestLock` |
| 27 | a clock that was set | `test_damaged_spools.py::test_27…` |
| 28 | umask 077 | `test_fs.py::test_28…`; modes are looked at after every kill |
| 29 | sticky folders | `test_fs.py::…::test_29…` |
| 30 | a folder on another mount | `test_damaged_spools.py::test_30…`, `test_fs.py::TestProbe` |
| 31 | names that are no UTF-8 | `test_damaged_spools.py::test_16_31_35…`, `test_fuzz.py` |
| 35 | unknown files | `test_damaged_spools.py::test_35…`; planted before every kill |

`acts` are what is tried, `verdict` is what must hold; `zygote` forks a process an act, `syscalls`
sees each of its calls, `faults` lets one fail, `disks` are real ones, `lossy` is a modelled one.
"""
