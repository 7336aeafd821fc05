"""What a pass knows of a graph: functions that read it, prove facts about it and rewrite it. No pass is here."""
