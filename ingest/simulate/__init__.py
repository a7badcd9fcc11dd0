"""An upstream for demos and tests: recordings or invented RSVPs, played live."""

from ingest.simulate.generator import RsvpGenerator, generate
from ingest.simulate.lines import FileLines, GeneratedLines, Lines, SceneLines, renew_rsvp
from ingest.simulate.play import Play, play_pipeline, play_source, scene_players
from ingest.simulate.player import Player, PlayerStatus
from ingest.simulate.server import run_player

__all__ = [
    "FileLines",
    "GeneratedLines",
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
