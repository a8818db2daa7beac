"""The stages: message, body and result of each. `headpond.tasks.stage.all_stages` finds every module here."""
