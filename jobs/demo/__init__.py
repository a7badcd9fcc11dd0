"""``millrace demo``: everything on one machine, a stream played into it, its results shown and counted."""
