"""How families read config.json: fields, each checked as it is read, and rotary parameters in their spellings."""
