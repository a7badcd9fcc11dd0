"""Care of tables: small files put together, partials folded, logs kept short, old files removed, retention kept.

Three rules. A product has one writer, so whatever makes a commit of its table runs in that writer, between two batches
(or with the writer's lock held). Bronze is append-only and its commits take turns, so its small files can be put
together beside the writers. And nothing is removed that somebody was promised, or that a query has still to read.
"""

from lakehouse.maintain.care import Maintenance

__all__ = ["Maintenance"]
