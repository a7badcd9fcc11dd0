"""An upstream for demos and tests: recordings or invented RSVPs, played live."""

from ingest.simulate.generator import RsvpGenerator, generate
from ingest.simulate.lines import FileLines, GeneratedLines, Lines, renew_rsvp
from ingest.simulate.play import play_source
from ingest.simulate.player import Player, PlayerStatus
from ingest.simulate.server import run_player

__all__ = [
    "FileLines",
    "GeneratedLines",
    "Lines",
    "Player",
    "PlayerStatus",
    "RsvpGenerator",
    "generate",
    "play_source",
    "renew_rsvp",
    "run_player",
]
