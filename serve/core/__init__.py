"""Who gets which bytes, without I/O or a clock. Transports import the core; the core imports no transport.

::

    tables' tails ──► hub ──► streams (one a view) ──► wire channels (one a wire form) ──► ring ──► subscribers
"""
