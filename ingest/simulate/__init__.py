"""A live upstream for demos and tests, which plays recordings or invented events."""

from __future__ import annotations

from ingest.simulate.generator import RsvpGenerator, generate
from ingest.simulate.player import FileLines, Lines, Player, PlayerStatus, SceneLines, renew_rsvp
from ingest.simulate.server import Play, play_pipeline, play_source, run_player, scene_players

__all__ = [
    "FileLines",
    "Lines",
    "Play",
    "Player",
    "PlayerStatus",
    "RsvpGenerator",
    "SceneLines",
    "generate",
    "play_pipeline",
    "play_source",
    "renew_rsvp",
    "run_player",
    "scene_players",
]
