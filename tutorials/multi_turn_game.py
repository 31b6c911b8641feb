# %% [markdown]
# # multi_turn_game
#
# Text.

# %%
print(1)
