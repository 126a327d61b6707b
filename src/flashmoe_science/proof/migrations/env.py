"""Where Alembic begins: it works on the connection that the store hands it, inside the store's transaction."""

from __future__ import annotations

from alembic import context

from flashmoe_science.proof.database import METADATA

connection = context.config.attributes.get("connection")
if connection is None:
    raise SystemExit(
        "flashmoe upgrades its store itself, whenever it writes to it; here only `alembic revision` is of use"
    )
context.configure(connection=connection, target_metadata=METADATA, transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
