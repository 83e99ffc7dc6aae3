"""Where the time of a step goes: named ranges, and a window of steps that torch's profiler records."""
