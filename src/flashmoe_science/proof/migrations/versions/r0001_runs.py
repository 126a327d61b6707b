"""The table of runs, as it was before there were migrations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "runs",
        sa.Column("id", sa.String(200), primary_key=True),
        sa.Column("created_at", sa.String(40), nullable=False),
        sa.Column("subject", sa.String(200), nullable=False),
        sa.Column("operator", sa.String(200), nullable=False),
        sa.Column("suite", sa.String(200), nullable=False),
        sa.Column("gpu", sa.String(200), nullable=False),
        sa.Column("commit", sa.String(64), nullable=False),
        sa.Column("complete", sa.Boolean, nullable=False),
        sa.Column("result", sa.String(200), nullable=False),
        sa.Column("cases", sa.Integer, nullable=False),
        sa.Column("measured", sa.Integer, nullable=False),
        sa.Column("document", sa.Text, nullable=False),
    )
    op.create_index("ix_runs_created_at", "runs", ["created_at"])
