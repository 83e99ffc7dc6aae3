"""What a user's own training loop needs: `stormo.World` joins, spreads, weighs, reduces, saves and loads."""
