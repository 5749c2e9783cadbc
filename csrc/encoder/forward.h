// A batch from token ids to vectors: the ops of the model's program (README.md has them as a table), then the heads.
#pragma once

#include "encoder/device_model.h"
#include "encoder/plan.h"

namespace embert {

// Queues a forward pass. The plan determines all launches, so they can be captured as a graph. decider: null, or the
// layers after the model's that CLASSIFY takes.
Status forward(const DeviceModel& model, const DeviceModel* decider, const BatchPlan& plan, const Stream& stream);

// The last layer's rows: of all tokens in Buffer::kX, or those that gathered_row selects, one a sequence.
struct LastRows {
  RowView view;
  bool gathered;
};

// heads.cpp: the end of a forward pass.
Status run_heads(const DeviceModel& model, const BatchPlan& plan, const LastRows& rows, const Stream& stream);
// heads.cpp: the end of a decider's forward pass. It computes a logit for each token with the id `marker`.
Status run_decider_head(const DeviceModel& decider, int marker, const BatchPlan& plan, const LastRows& rows,
                        const Stream& stream);

}  // namespace embert
