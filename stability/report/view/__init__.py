"""What every view shows alike: text, colours, intervals."""
