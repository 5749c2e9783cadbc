"""Several models in one server: what each gets of the device, and what an interactive one waits beside a bulk one."""
