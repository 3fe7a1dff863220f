"""`octavo bench`: a load client for any server that speaks OpenAI's API."""
