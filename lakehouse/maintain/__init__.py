"""Care of tables: maintenance in the driver and by a command, and the report on them."""
