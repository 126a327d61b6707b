"""The ledger: what each gate of each run took of a GPU, and costs entered by hand."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Make the table, and book the runs that are there already."""
    ledger = op.create_table(
        "ledger",
        sa.Column("id", sa.String(260), primary_key=True),
        sa.Column("at", sa.String(40), nullable=False),
        sa.Column("run", sa.String(200), nullable=False),
        sa.Column("gate", sa.String(40), nullable=False),
        sa.Column("subject", sa.String(200), nullable=False),
        sa.Column("suite", sa.String(200), nullable=False),
        sa.Column("gpu", sa.String(200), nullable=False),
        sa.Column("gpu_seconds", sa.Float, nullable=False),
        sa.Column("dollars_per_hour", sa.Float),
        sa.Column("dollars", sa.Float),
        sa.Column("note", sa.Text, nullable=False),
    )
    op.create_index("ix_ledger_at", "ledger", ["at"])
    op.create_index("ix_ledger_run", "ledger", ["run"])

    runs = sa.table("runs", *(sa.column(name) for name in ("id", "created_at", "subject", "suite", "gpu", "document")))
    connection = op.get_bind()
    ids = list(connection.scalars(sa.select(runs.c.id)))
    for run_id in ids:  # one document after the other: all together need not fit into memory
        run = connection.execute(sa.select(runs).where(runs.c.id == run_id)).mappings().one()
        for gate in _gates_on_a_gpu(run["document"]):
            row = {name: run[name] for name in ("subject", "suite", "gpu")}
            row |= {"id": f"{run_id}/{gate['name']}", "run": run_id, "at": run["created_at"], "gate": gate["name"]}
            connection.execute(sa.insert(ledger).values(**row, gpu_seconds=gate["gpu_seconds"], note=""))


def _gates_on_a_gpu(document: str) -> list[dict[str, Any]]:
    """Return the gates to book. A document that cannot be read stays in the store: whoever shows that run is told."""
    try:
        record = json.loads(document)
    except ValueError:
        return []
    return [gate for gate in record.get("gates", ()) if gate.get("gpu_seconds", 0.0) > 0.0]
