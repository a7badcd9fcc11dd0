"""Products as the lakehouse commits them, written directly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, write_deltalake

from lakehouse.contract.lake import COMMIT_THROUGH, PROPERTY_FOLD, PROPERTY_KEY, PROPERTY_ORDER, Lake


def commit(
    lake: Lake,
    name: str,
    rows: list[dict[str, Any]],
    *,
    key: str,
    through: Mapping[str, int] | None = None,
    fold: Mapping[str, str] | None = None,
    order: str = "",
    mode: str = "overwrite",
) -> None:
    """One commit of a gold product."""
    configuration = {PROPERTY_KEY: key}
    if fold:
        configuration |= {PROPERTY_FOLD: orjson.dumps(dict(fold)).decode(), PROPERTY_ORDER: order}
    metadata = {COMMIT_THROUGH: orjson.dumps(dict(through)).decode()} if through else None
    table, path = pa.Table.from_pylist(rows), lake.table("gold", name).path
    if not path.exists():  # version 0 is the empty table, as the lakehouse makes it
        path.mkdir(parents=True)
        DeltaTable.create(str(path), table.schema, configuration=configuration, raise_if_key_not_exists=False)
    write_deltalake(
        str(path),
        table,
        mode=mode,  # type: ignore[call-overload]
        commit_properties=CommitProperties(custom_metadata=metadata),
    )
