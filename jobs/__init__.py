"""Entry points: what spark-submit and the ``millrace`` command start. Only here are the tiers wired together."""
